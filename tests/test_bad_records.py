"""Bad records of every kind, in plain, compressed and cut files: named, or skipped and nothing else lost."""

import json
import os
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from ctl.data import pipeline
from ctl.data.bad_records import BadRecords
from ctl.data.index import load_index
from ctl.data.inputs import make_layout
from ctl.data.records import make_source
from ctl.errors import GuardError
from ctl.experiment import Experiment
from ctl.paths import find_files
from experiments import bert_mlm
from tests import bert_records
from tests.bert_records import LENGTH, VOCAB, make_record, write_file
from tests.runs import Workdir, door, overrides, write_shallow
from tools import explain_input

# What is wrong with record 35 of 40, beyond those that are looked at before the first step, and what is said.
WRONG = {
    'length': (dict(input_ids=np.full(9, 7)), 'feature input_ids has 9 values, expected 16'),
    'missing': (dict(segment_ids=None), 'has no feature segment_ids'),
    'id': (dict(masked_lm_ids=np.full(5, VOCAB)), f'has id {VOCAB}, which is not in [0, model.vocab_size={VOCAB})'),
    'kind': (dict(input_mask=np.ones(LENGTH, np.float32)), 'feature input_mask holds floats, expected integers'),
}
SKIP = overrides(data__on_bad_record='skip')


def write_one_bad(folder: pathlib.Path, what: str, compression: str) -> tuple[pathlib.Path, int]:
    """A second training file of 40 records with one that is bad; the file, and the bad record's number."""
    path, number, rng = folder / 'train-1.tfrecord', 35, np.random.default_rng(5)
    changed = WRONG[what][0] if what in WRONG else {}
    records = [make_record(rng, **(changed if i == number else {})) for i in range(40)]
    if what in WRONG:
        write_file(path, records, compression)
        return path, number
    write_file(path, records)
    content = load_index([str(path)])
    data, place = bytearray(path.read_bytes()), int(content.starts[number])
    if what == 'cut off':
        number, data = 39, data[:-7]
    else:
        data[place + {'checksum': 20, 'framing': 1}[what]] ^= 1
    path.write_bytes(data)
    if compression:
        whole = path.read_bytes()
        path.write_bytes(bert_records.COMPRESS[compression](whole))
    return path, number


KINDS = [*WRONG, 'checksum', 'framing', 'cut off']


def quick(compressions, *some):
    """Every kind with every compression: `some` in every run of the tests, the others among the long proofs."""
    for what in KINDS:
        for compression in compressions:
            marks = [] if (what, compression) in some else [pytest.mark.slow]
            yield pytest.param(what, compression, marks=marks, id=f'{what}-{compression}')


@pytest.mark.parametrize(
    'what, compression',
    quick(['', 'GZIP'], ('id', ''), ('missing', 'GZIP'), *((what, '') for what in ('checksum', 'framing', 'cut off'))),
)
def test_with_fail_a_bad_record_stops_the_run_by_name(tmp_path, capsys, what, compression):  # C21, C23, C25
    flags = [*write_shallow(tmp_path, train_counts=(20, 20)), f'--workdir={tmp_path / "run"}']
    path, number = write_one_bad(tmp_path, what, compression)
    assert door(*flags, *overrides(train__steps=30)) == 2
    error = capsys.readouterr().err.strip()
    assert error.count('\n') == 0
    damage = {'checksum': 'has a wrong checksum', 'framing': 'has a damaged length', 'cut off': 'is cut off'}
    said = WRONG[what][1] if what in WRONG else damage[what]
    assert f'{path}: record {number}' in error and said in error
    assert '--config.data.on_bad_record=skip' in error


@pytest.mark.parametrize(
    'what, compression',
    quick(
        ['', 'GZIP', 'ZLIB'], *((what, '') for what in KINDS), ('id', 'GZIP'), ('checksum', 'GZIP'), ('cut off', 'ZLIB')
    ),
)
def test_with_skip_only_the_bad_record_is_lost(tmp_path, what, compression):
    """Every record of two epochs, against those that were written."""
    write_shallow(tmp_path, train_counts=(40, 40))
    path, number = write_one_bad(tmp_path, what, compression)
    config, said = bert_mlm.get_config(), []
    config.data.on_bad_record = 'skip'
    for key, value in bert_records.FITTING.items():
        config.model[key.removeprefix('model.')] = value
    bad = BadRecords(config.data, said.append)
    index = load_index(find_files(str(tmp_path / 'train-*'), 'data.train'))
    bad.take_damaged(index)
    source = make_source(index, Experiment(bert_mlm.make_features(config.model), {}, []), bad)
    config.train.global_batch_size = 8
    layout = make_layout(index, config, 2, 'file')
    dataset = pipeline.make_train_dataset_fn(source, layout, 0)(tf.distribute.InputContext())
    read, sound, zeroed, instead = [], [], [], []
    for batch in dataset.take(20).as_numpy_iterator():
        for record, weight, ids in zip(batch['record'], batch['example_weight'], batch['input_ids'], strict=True):
            if weight:
                example = tf.train.Example.FromString(index.read(int(record)))
                sound.append(list(example.features.feature['input_ids'].int64_list.value))
                assert ids.tolist() == sound[-1]
            else:
                instead.append(ids.tolist())
                zeroed.append(int(record))
            read.append(int(record))
    everything = list(range(80)) if what in WRONG else list(range(79))
    assert sorted(set(read)) == everything
    assert all(ids in sound for ids in instead)  # for zeros may be what no record is, and their loss NaN
    assert set(zeroed) == ({40 + number} if what in WRONG else set())
    (line,) = said
    assert f'bad record: {path}: record {number} ' in line
    assert (bad.damaged, bad.wrong) == ((0, 1) if what in WRONG else (1, 0))


def test_a_skipped_record_is_said_planned_counted_and_listed(tmp_path, capsys):
    flags = [*write_shallow(tmp_path, train_counts=(40, 40)), f'--workdir={tmp_path / "run"}', *SKIP]
    path, number = write_one_bad(tmp_path, 'id', '')
    os.truncate(tmp_path / 'train-0.tfrecord', os.path.getsize(tmp_path / 'train-0.tfrecord') - 3)
    assert door(*flags, *overrides(train__steps=25, log__every=5)) == 0
    out = capsys.readouterr().out
    assert f'bad record: {tmp_path}/train-0.tfrecord: record 39 is cut off; left out.' in out
    assert f'bad record: {path}: record {number} feature masked_lm_ids has id {VOCAB}' in out
    assert out.count('bad record: ') == 2
    assert '1 damaged and left out, 0 wrong and of weight 0; the run stops above 100' in out
    assert f'bad records   1 damaged and left out, 1 wrong and of weight 0 ({tmp_path}/run/bad_records.jsonl)' in out
    listed = [json.loads(line) for line in (tmp_path / 'run' / 'bad_records.jsonl').read_text().splitlines()]
    assert [(each['file'], each['record']) for each in listed] == [
        (str(tmp_path / 'train-0.tfrecord'), 39),
        (str(path), 35),
    ]
    lines = Workdir(tmp_path / 'run').lines('train')
    assert {line['damaged_records'] for line in lines} == {1}
    counts = [line['skipped_examples'] for line in lines]
    # 25 steps of 8 are two epochs and a half of 79 records.
    assert counts == sorted(counts) and counts[-1] in (2, 3)


@pytest.mark.slow
def test_a_bad_record_trains_nothing_and_moves_no_other(tmp_path):
    """Weights after an epoch with a wrong record are those after one with that record's weights at 0."""
    flags = [*write_shallow(tmp_path, train_counts=(40, 40)), *SKIP, '--config.model.next_sentence=false']
    steps = overrides(train__steps=10)
    write_one_bad(tmp_path, 'length', '')
    assert door(*flags, *steps, f'--workdir={tmp_path / "skipped"}') == 0
    rng = np.random.default_rng(5)
    silent = dict(masked_lm_weights=np.zeros(5, np.float32))
    records = [make_record(rng, **(silent if i == 35 else {})) for i in range(40)]
    write_file(tmp_path / 'train-1.tfrecord', records)
    assert door(*flags, *steps, f'--workdir={tmp_path / "silent"}') == 0
    skipped, unweighted = Workdir(tmp_path / 'skipped').weights, Workdir(tmp_path / 'silent').weights
    for name, value in skipped.items():
        np.testing.assert_allclose(value, unweighted[name], rtol=1e-5, atol=1e-6)


def test_more_bad_records_than_allowed_stop_the_run_with_exit_3(tmp_path, capsys):
    stop_at_too_many(tmp_path, capsys)


def stop_at_too_many(tmp_path, capsys):
    """A run with 5 bad records where 3 are allowed; its flags."""
    flags = [*write_shallow(tmp_path, train_counts=(40, 40)), f'--workdir={tmp_path / "run"}', *SKIP]
    rng = np.random.default_rng(0)
    wrong = [make_record(rng, input_ids=np.full(LENGTH, VOCAB)) if i >= 35 else make_record(rng) for i in range(40)]
    write_file(tmp_path / 'train-1.tfrecord', wrong)
    assert door(*flags, *overrides(train__steps=30, data__max_bad_records=3)) == 3
    error = capsys.readouterr().err.strip()
    assert 'bad records are more than data.max_bad_records=3' in error and '\n' not in error
    assert 'train-1.tfrecord: record 3' in error and 'bad_records.jsonl' in error
    return flags


@pytest.mark.slow
def test_bad_records_are_counted_once_each_also_over_restarts(tmp_path, capsys):
    """With room for all five the run goes on, and no step is missing."""
    flags = stop_at_too_many(tmp_path, capsys)
    assert door(*flags, *overrides(train__steps=30, data__max_bad_records=5)) == 0
    assert [line['step'] for line in Workdir(tmp_path / 'run').lines('train')] == list(range(1, 31))
    assert len((tmp_path / 'run' / 'bad_records.jsonl').read_text().splitlines()) == 5


def test_more_damaged_records_than_allowed_stop_the_run_before_it_starts(tmp_path, capsys):
    flags = [*write_shallow(tmp_path), f'--workdir={tmp_path / "run"}', *SKIP]
    os.truncate(tmp_path / 'train-0.tfrecord', os.path.getsize(tmp_path / 'train-0.tfrecord') - 3)
    assert door(*flags, '--config.data.max_bad_records=0', '--dry_run') == 3
    assert '1 bad records are more than data.max_bad_records=0' in capsys.readouterr().err
    assert not (tmp_path / 'run').exists()


def test_settings_that_fit_no_record_are_refused_and_not_skipped(tmp_path, capsys):
    flags = [*write_shallow(tmp_path), f'--workdir={tmp_path / "run"}', *SKIP]
    assert door(*flags, '--config.model.max_length=32') == 2
    assert 'input_ids has 16 values, expected 32: set --config.model.max_length=16' in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_a_wrong_record_stopped_goes_on_with_skip(tmp_path):
    flags = [*write_shallow(tmp_path, train_counts=(40, 40)), f'--workdir={tmp_path / "run"}']
    write_one_bad(tmp_path, 'missing', '')
    steps = overrides(train__steps=12, checkpoint__every=1)
    assert door(*flags, *steps) == 2
    assert door(*flags, *steps, *SKIP) == 0
    assert [line['step'] for line in Workdir(tmp_path / 'run').lines('train')] == list(range(1, 13))


@pytest.mark.slow
def test_bad_evaluation_records_are_skipped_too(tmp_path):
    flags = [*write_shallow(tmp_path), f'--workdir={tmp_path / "run"}', *SKIP]
    rng = np.random.default_rng(1)
    sound = [make_record(rng) for _ in range(50)]
    write_file(tmp_path / 'eval-0.tfrecord', [*sound[:40], make_record(rng, segment_ids=None), *sound[40:]])
    (tmp_path / 'eval-1.tfrecord').unlink()
    assert door(*flags, *overrides(train__steps=1)) == 0
    write_file(tmp_path / 'eval-0.tfrecord', sound)
    assert door(*flags[:-2], f'--workdir={tmp_path / "sound"}', *overrides(train__steps=1)) == 0
    skipped, whole = (Workdir(tmp_path / name).lines('eval')[0] for name in ('run', 'sound'))
    assert skipped['masked_lm_loss'] == pytest.approx(whole['masked_lm_loss'], rel=1e-6)


def test_the_real_pipeline_reads_what_is_explained_around_bad_records(tmp_path, capsys):
    flags = [*write_shallow(tmp_path, train_counts=(40, 40)), f'--workdir={tmp_path / "run"}', *SKIP]
    write_one_bad(tmp_path, 'length', 'GZIP')
    os.truncate(tmp_path / 'train-0.tfrecord', os.path.getsize(tmp_path / 'train-0.tfrecord') - 3)
    assert explain_input.main([*flags, '--steps=0:25', '--verify']) == 0
    assert 'An epoch reads 79 of 79 records: complete, disjoint.' in capsys.readouterr().out


def test_a_file_that_changes_while_a_run_goes_on_is_refused(tmp_path, capsys, monkeypatch):
    from ctl.runtime import actions

    flags = [*write_shallow(tmp_path), f'--workdir={tmp_path / "run"}']
    report = actions.Reporter.__call__

    def report_and_touch(self, output):
        os.utime(tmp_path / 'train-2.tfrecord')
        report(self, output)

    monkeypatch.setattr(actions.Reporter, '__call__', report_and_touch)
    assert door(*flags, *overrides(train__steps=400, train__global_batch_size=80, data__logical_shards=4)) == 2
    error = capsys.readouterr().err.strip()
    assert 'train-2.tfrecord: changed since it was indexed' in error and '\n' not in error


def test_a_record_that_is_damaged_after_its_file_was_indexed_is_found_by_name(tmp_path, capsys):
    """As a failing disk would: the size and the time are what they were."""
    flags = [*write_shallow(tmp_path, train_counts=(40, 40)), f'--workdir={tmp_path / "run"}']
    assert door(*flags, '--dry_run') == 0
    path = tmp_path / 'train-1.tfrecord'
    stat, data = os.stat(path), bytearray(path.read_bytes())
    data[-6] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert door(*flags, *overrides(train__steps=30)) == 2
    error = capsys.readouterr().err.strip()
    assert 'train-1.tfrecord: record 39 has a wrong checksum, and was sound before' in error and '\n' not in error
    # Now it is known, and not believed again.
    assert door(*flags, '--dry_run') == 2
    assert 'train-1.tfrecord: record 39 has a wrong checksum' in capsys.readouterr().err


def test_only_the_first_of_many_are_said_and_all_are_counted():
    said, config = [], bert_mlm.get_config()
    config.data.on_bad_record = 'skip'
    bad = BadRecords(config.data, said.append)

    class Files:
        files = ('f',)
        locate = staticmethod(lambda record: (0, record))
        name = staticmethod(lambda record: f'f: record {record}')

    for record in [*range(90), *range(90)]:
        bad.take_wrong(Files, record, f'f: record {record}: wrong')
    assert len(said) == 20 and bad.wrong == 90
    with pytest.raises(GuardError, match='101 bad records'):
        for record in range(90, 200):
            bad.take_wrong(Files, record, 'wrong')


def test_a_guard_prints_the_records_of_the_step_whose_loss_was_not_finite(tmp_path, capsys):
    """A weight that is no number in one record: which step reads it is known, and steps are reported 10 at a time."""
    flags = [*write_shallow(tmp_path), f'--workdir={tmp_path / "run"}', *overrides(log__every=10, devices__replicas=2)]
    rng = np.random.default_rng(0)
    nan = np.full(bert_records.PREDICTIONS, np.nan, np.float32)
    records = [make_record(rng, **({'masked_lm_weights': nan} if i == 13 else {})) for i in range(20)]
    write_file(tmp_path / 'train-1.tfrecord', records)
    assert explain_input.main([*flags, '--json', '--steps=0:10']) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (step,) = {line['step'] for line in lines if ['train-1.tfrecord', 13] in line['records']}
    assert door(*flags, *overrides(train__steps=40)) == 3
    captured = capsys.readouterr()
    assert f'the loss became nan in step {step};' in captured.err and captured.err.count('\n') == 1
    listing = captured.out[captured.out.index(f'Step {step} feeds') :].splitlines()
    for line in (line for line in lines if line['step'] == step):
        shown = next(text for text in listing if f'replica {line["replica"]} (' in text)
        for file, number in line['records']:
            assert str(number) in shown.partition(f'{file}: ')[2].split(',')[0].split()
    assert not list((tmp_path / 'run' / 'checkpoints').glob('*'))
