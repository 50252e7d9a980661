"""Settings, overrides, and what a later start may change."""

import json

import ml_collections
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctl import config as config_lib
from ctl import flags, train
from ctl.errors import UserError
from ctl.experiment import load_experiment

BERT = '--experiment=bert_mlm'


def parse(*words):
    return train.PROGRAM.parse([BERT, *words]).config


@pytest.mark.parametrize(
    'text, value',
    [
        ('1000', 1000),
        ('1e3', 1000),
        ('1000.0', 1000),
        ('1_000', 1000),
        ('12345678901234567', 12345678901234567),
        ('9223372036854775807', 2**63 - 1),
    ],
)
def test_a_whole_number_may_be_written_in_several_ways(text, value):
    assert parse(f'--config.train.steps={text}').train.steps == value


@pytest.mark.parametrize('text', ['10.5', 'ten', '', 'nan', 'inf', '1e400', '0x10'])
def test_what_is_not_a_whole_number_is_refused_with_the_key_and_the_text(text):
    with pytest.raises(UserError, match=rf'--config.train.steps={text}: expected a whole number'):
        parse(f'--config.train.steps={text}')


@given(st.integers(1, 10**12))
def test_every_integer_comes_through(n):
    assert config_lib.parse_text('train.steps', str(n), 1) == str(n)


@pytest.mark.parametrize('word', ['--config.train.steps=7', '-config.train.steps=7'])
def test_overrides_are_put_in(word):
    assert parse(word).train.steps == 7


def test_an_override_may_stand_in_two_words():
    assert parse('--config.optimizer.learning_rate', '1e-4').optimizer.learning_rate == 1e-4


@pytest.mark.parametrize('word', ['--config.model.next_sentence=false', '--noconfig.model.next_sentence'])
def test_a_boolean_can_be_switched_off(word):
    assert parse(word).model.next_sentence is False


@pytest.mark.parametrize(
    'word, said',
    [
        ('--config.train.stepz=1', 'there is no key train.stepz; did you mean train.steps'),
        ('--config.trian.steps=1', r'there is no key trian; did you mean train\?'),
        ('--config.batch_size=1', 'there is no key batch_size; did you mean train.global_batch_size'),
        ('--config.learning_rate=1', 'did you mean optimizer.learning_rate'),
        ('--config.train.steps.more=1', 'train.steps is a value, not a section'),
        ('--config.train=1', 'is a section; set one of train.deterministic'),
        ('--config.train.steps', 'a value is missing'),
        ('--config.train.steps=0', 'train.steps=0: must be at least 1'),
        ('--config.model.dropout=1', 'model.dropout=1.0: must be below 1'),
        ('--config.optimizer.name=adagrad', 'optimizer.name=adagrad: choose one of adamw, lamb, sgd, adam'),
        ('--config.train.precision=float16', 'choose one of float32, tensorfloat32, bfloat16'),
        ('--config.eval.steps=0', 'eval.steps=0'),
        ('--config.data.train=x', 'data.train is set and data.eval is not'),
        ('--config.model.next_sentence=maybe', 'expected true or false'),
        ('--config.optimizer.learning_rate=fast', 'expected a number'),
        ('--workdri=x', 'there is no such flag; did you mean --workdir'),
        ('--dry_run=perhaps', 'dry_run'),
        ('train', 'flags begin with --'),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_that_names_it(word, said):
    with pytest.raises(UserError, match=said) as caught:
        parse(word)
    assert '\n' not in str(caught.value)


def test_a_misspelt_experiment_is_refused_with_the_nearest():
    with pytest.raises(UserError, match='--experiment=bert_mml: did you mean bert_mlm'):
        train.PROGRAM.parse(['--experiment=bert_mml'])


def test_without_an_experiment_the_error_lists_them():
    with pytest.raises(UserError, match='--experiment is missing; there are: bert_mlm'):
        train.PROGRAM.parse([])


def make_user_experiment(tmp_path, body):
    path = tmp_path / 'mine.py'
    path.write_text(
        f'import ml_collections\n\n\ndef get_config():\n{body}\n\n\ndef make_experiment(config):\n    pass\n'
    )
    return f'--experiment={path}'


@pytest.mark.parametrize(
    'override, value', [('--config.path=x', 'x'), ('--config.sizes=(1, 2)', (1, 2)), ('--config.names=("a",)', ('a',))]
)
def test_none_and_empty_defaults_of_a_users_config_can_be_overridden_and_frozen(tmp_path, override, value):  # C52
    body = (
        '    config = ml_collections.ConfigDict(dict(path=None, sizes=(0,), names=(), items=[]))\n'
        '    config.path = ml_collections.config_dict.placeholder(str)\n'
        '    from ctl.config import base_config\n'
        '    base = base_config()\n    base.unlock()\n    base.update(config)\n    return base'
    )
    config = train.PROGRAM.parse([make_user_experiment(tmp_path, body), override]).config
    key = override.split('=')[0].removeprefix('--config.')
    assert config[key] == value
    assert ml_collections.FrozenConfigDict(config)[key] == value
    assert json.loads(config_lib.to_json(config))


@pytest.mark.parametrize(
    'value, override, said',
    [
        ('object', '--config.mine=3', 'mine'),
        ('object', '--config.train.steps=3', 'mine=.*config.json cannot hold a type'),
        ('ml_collections.ConfigDict({1: 2})', '--config.mine.1=3', 'there is no key mine.1|mine.1'),
    ],
)
def test_a_config_that_cannot_be_overridden_or_stored_is_one_line(tmp_path, value, override, said):  # C52
    body = (
        '    from ctl.config import base_config\n    config = base_config()\n    config.unlock()\n'
        f'    config.mine = {value}\n    return config'
    )
    with pytest.raises(UserError, match=said) as caught:
        train.PROGRAM.parse([make_user_experiment(tmp_path, body), override])
    assert '\n' not in str(caught.value)


@pytest.mark.parametrize('value', ['None', '(1, 2)', '()', '[]', 'ml_collections.ConfigDict({1: 2})', '{}'])
def test_a_users_odd_values_are_stored_and_found_unchanged_by_a_later_start(tmp_path, value):  # C52
    body = (
        '    from ctl.config import base_config\n    config = base_config()\n    config.unlock()\n'
        f'    config.mine = {value}\n    return config'
    )
    first, later = (train.PROGRAM.parse([make_user_experiment(tmp_path, body)]).config for _ in range(2))
    config_lib.resume(later, json.loads(config_lib.to_json(first)))
    assert later.to_dict() == first.to_dict()


def test_a_users_file_that_fails_at_import_is_named_with_the_line(tmp_path):
    path = tmp_path / 'broken.py'
    path.write_text('x = 1\ny = x.nothing\n')
    with pytest.raises(UserError, match=r'importing it failed at .*broken.py:2: AttributeError'):
        train.PROGRAM.parse([f'--experiment={path}'])


def test_a_users_file_without_the_two_functions_is_refused(tmp_path):
    (tmp_path / 'half.py').write_text('def get_config():\n    pass\n')
    with pytest.raises(UserError, match=r'has no function make_experiment\(\)'):
        train.PROGRAM.parse([f'--experiment={tmp_path / "half.py"}'])


def test_help_lists_every_experiment_and_every_key_with_its_meaning(capsys):
    assert train.PROGRAM.parse(['--help']) is None
    text = capsys.readouterr().out
    config = parse()
    for key in config_lib.flatten(config):
        line = next(line for line in text.splitlines() if line.strip().startswith(f'{key} '))
        assert config_lib.setting(key).help in line
    for name, summary in flags.list_experiments().items():
        assert f'{name} ' in text and summary and summary in text


def test_a_later_start_may_change_only_what_does_not_make_it_another_run():
    stored = parse().to_dict()
    stored['data'].update(train='t*', eval='e*', logical_shards=8, shard_by='file')
    again = parse('--config.train.steps=9', '--config.train.microbatches=2', '--config.devices.replicas=2',
                  '--config.log.every=3', '--config.eval.every=4', '--config.checkpoint.keep=9',
                  '--config.data.train=t*', '--config.data.eval=e*')  # fmt: skip
    config_lib.resume(again, stored)
    assert again.data.logical_shards == 8 and again.data.shard_by == 'file'
    assert again.train.steps == 9

    for word, said in (
        ('--config.train.seed=1', 'train.seed was 0 and is 1'),
        ('--config.data.logical_shards=4', 'data.logical_shards was 8 and is 4'),
        ('--config.model.width=64', 'model.width was 128 and is 64'),
    ):
        changed = parse('--config.data.train=t*', '--config.data.eval=e*', word)
        with pytest.raises(UserError, match=said + '.*Choose another --workdir'):
            config_lib.resume(changed, stored)


def later(stored, *words):
    """The config of a later start of a run with `stored`, and what is said of it."""
    config = parse(*words)
    return config, config_lib.resume(config, stored, load_experiment('bert_mlm').get_config())


def test_a_setting_that_came_after_a_run_began_counts_as_its_default():
    """The experiment's own default, and not what is typed now."""
    stored = parse().to_dict()
    del stored['data']['eval_digest'], stored['optimizer']['warmup_steps'], stored['log'], stored['model']
    assert later(stored, '--config.log.every=3')[0].log.every == 3
    with pytest.raises(UserError, match='model.width was 128 and is 64; optimizer.warmup_steps was 200 and is 7'):
        later(stored, '--config.optimizer.warmup_steps=7', '--config.model.width=64')


def test_a_setting_that_is_no_more_is_named_with_what_took_its_place_and_the_run_goes_on(monkeypatch):
    stored = parse().to_dict()
    stored['train']['momentum'] = 0.9
    with pytest.raises(UserError, match=r"train.momentum was 0.9 and is '\(not there\)'"):
        later(stored)
    monkeypatch.setattr(config_lib, 'REPLACED', {'train.momentum': 'set optimizer.beta_1.'})
    config, said = later(stored)
    assert said == ['WARNING: train.momentum=0.9 of config.json is no more: set optimizer.beta_1.']
    assert later(config.to_dict())[1] == []  # as config.json is written anew, it is said once


@pytest.mark.parametrize('word', ['train.steps_per_loop=7', 'devices.input_pipelines=per_replica'])
def test_a_later_start_may_trade_memory_for_time(word):
    assert later(parse().to_dict(), f'--config.{word}')[1] == []


@pytest.mark.parametrize(
    'word', ['data.window_mebibytes=7', 'data.window_records=7', 'data.block_records=7', 'train.precision=bfloat16']
)
def test_a_later_start_may_not_change_the_order_of_records_or_the_arithmetic(word):
    with pytest.raises(UserError, match=word.partition('=')[0]):
        later(parse().to_dict(), f'--config.{word}')
