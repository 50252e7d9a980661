"""Whatever is typed, and whatever is in the files: it works, or one line says what is wrong; never a traceback."""

import gzip
import random

import numpy as np
import pytest
import tensorflow as tf

from ctl import config as config_lib
from experiments import bert_mlm
from tests.bert_records import make_record
from tests.runs import door, overrides, write_shallow
from tools.record_files import make_example

pytestmark = pytest.mark.slow

VALUES = [
    *('', '0', '1', '-1', '2', '3', '7', '8', '64', '1000', '0.5', '-0.5', '1.', '1_000', '0x10', '1e-400', '1e999'),
    *('nan', 'inf', '-inf', '9' * 30, 'true', 'false', 'None', '[]', '{}', '(1,2)', 'a,b', 'a b', '\n', '%s', '{x}'),
    *('auto', 'one', 'max', 'loss', 'lamb', 'skip', 'fail', '--help', '*', '~', '/', '..', 'gs://b/x', "'", '"'),
    *('é', '١', '\x00', '\udcff'),
]


def check(words, capsys):
    """A run that could start, or one line and exit 2 (3 for a guard)."""
    code = door(*words, '--dry_run')
    error = capsys.readouterr().err
    assert code in (0, 2, 3), words
    if code:
        assert error.startswith('error: ') and error.count('\n') == 1, (words, error)
    return code


def mutate(rng, words, keys):
    """The words of a sound command with one thing done to them."""
    key, value = rng.choice(keys), rng.choice(VALUES)
    where = rng.randrange(len(words))
    return rng.choice(
        [
            *[[*words, f'--config.{key}={value}']] * 15,
            [*words, f'--config.{key[:-1]}={value}'],
            [*words, f'--config.{key.partition(".")[0]}={value}'],
            [*words, f'--config.{key}'],
            [*words, f'--config.{key}', value],
            [*words, f'--noconfig.{key}'],
            [*words, f'--workdir={value}'],
            [*words, f'--{value}'],
            [*words, value],
            [f'--experiment={value}', *words[1:]],
            words[:where] + words[where + 1 :],
        ]
    )


def test_a_thousand_command_lines_give_no_traceback(tmp_path, capsys):
    rng, keys = random.Random(0), sorted(config_lib.flatten(bert_mlm.get_config()))
    sound, codes = write_shallow(tmp_path), []
    for _ in range(1000):
        words = sound
        for _ in range(rng.choice([1, 1, 2, 3])):
            words = mutate(rng, words, keys)
        if '--help' not in words:
            codes.append(check(words, capsys))
    assert codes.count(0) > 20 and codes.count(2) > 500


def odd_record(rng):
    """A record with one thing that is not as bert_mlm wants it."""
    record = make_record(np.random.default_rng(rng.randrange(1000)))
    name = rng.choice(list(record))
    other = rng.choice(list(record))
    size = record[name].size
    changes = [
        lambda: record.pop(name),
        lambda: record.clear(),
        lambda: record.update({name: np.zeros(rng.choice([0, 1, size + 1, 3 * size]), record[name].dtype)}),
        lambda: record.update({name: record[name].astype(np.float32) + 0.5}),
        lambda: record.update({name: np.full(size, rng.choice([-1, 2**31, 2**62, -(2**63)]))}),
        lambda: record.update({name: rng.choice([b'', b'text', b'\xff' * 99])}),
        lambda: record.update({name: np.full(size, rng.choice([np.nan, np.inf, -1.0]), np.float32)}),
        lambda: record.update({f'{name}\n': record.pop(name)}),
        lambda: record.update({name: record[other], other: record[name]}),
    ]
    rng.choice(changes)()
    return make_example(record).SerializeToString()


def odd_bytes(rng):
    """A payload that is no Example, or not one alone."""
    sound = make_example(make_record(np.random.default_rng(0))).SerializeToString()
    return rng.choice(
        [
            b'',
            rng.randbytes(rng.randrange(1, 300)),
            sound[: rng.randrange(len(sound))],
            sound + sound,
            sound + b'\x0a\x00',
            sound.replace(b'input_ids', b'input_\xff\xfe\xfd'),
            tf.train.SequenceExample().SerializeToString() + b'\x12\x00',
        ]
    )


def spoil(rng, data):
    """The bytes of a file of records with one thing done to them."""
    place = rng.randrange(len(data))
    return rng.choice(
        [
            data[:place],
            data[place:],
            data[:place] + rng.randbytes(rng.randrange(1, 40)) + data[place:],
            data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :],
            data + data[:place],
            gzip.compress(data)[: max(1, place // 4)],
            gzip.compress(data) + data,
            rng.randbytes(len(data)),
            b'\0' * len(data),
            data.replace(b'\n', b'\r\n'),
        ]
    )


def test_three_hundred_odd_files_of_records_give_no_traceback(tmp_path, capsys):
    rng, codes = random.Random(0), []
    sound = write_shallow(tmp_path, train_counts=(20, 20))
    path = tmp_path / 'train-1.tfrecord'
    for _ in range(300):
        kind = rng.random()
        with tf.io.TFRecordWriter(str(path)) as writer:
            for number in range(20):
                odd = number == 7 or rng.random() < 0.1
                if odd and kind < 0.4:
                    writer.write(odd_record(rng))
                elif odd and kind < 0.6:
                    writer.write(odd_bytes(rng))
                else:
                    writer.write(make_example(make_record(np.random.default_rng(number))).SerializeToString())
        if kind >= 0.6:
            path.write_bytes(spoil(rng, path.read_bytes()))
        skips = overrides(data__on_bad_record=rng.choice(['fail', 'skip']))
        codes.append(check([*sound, *skips], capsys))
    assert codes.count(0) > 20 and codes.count(2) > 50
