"""A run as a user has it: the plan, the run directory, going on, and what is refused."""

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
import unittest.mock

import numpy as np
import pytest
import tensorflow as tf

from ctl import loop
from ctl.errors import UserError
from ctl.runtime.tensorboard import TensorBoard, tag_of
from tests.runs import (
    DEADLINE,
    ROOT,
    Workdir,
    door,
    door_until,
    overrides,
    printed_after,
    running,
    wait_for_step,
    without_rates,
    write_shallow,
)

pytestmark = pytest.mark.xdist_group('unbroken')  # for the runs that these tests share


def in_a_process(*words, **environment):
    """The door in a fresh process, as a user opens it."""
    return subprocess.run(
        [sys.executable, '-m', 'ctl.train', *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )


@pytest.fixture(scope='module')
def flags(tmp_path_factory):
    return write_shallow(tmp_path_factory.mktemp('data')) + ['--config.model.dropout=0.1']


@pytest.fixture(scope='module')
def unbroken(flags, tmp_path_factory):
    """12 steps on 2 replicas, dropout on, reports every 5 steps, never stopped."""
    workdir = tmp_path_factory.mktemp('unbroken')
    assert door(*flags, *LONG, f'--workdir={workdir}') == 0
    return Workdir(workdir)


@pytest.fixture(scope='module')
def short(flags, tmp_path_factory):
    """3 steps on 1 replica, a report of each, and an evaluation before the first."""
    workdir = tmp_path_factory.mktemp('short')
    assert door(*flags, *SHORT, f'--workdir={workdir}') == 0
    return Workdir(workdir)


@pytest.fixture
def copied(short, tmp_path):
    """The run of 3 steps, to go on with."""
    return shutil.copytree(short.path, tmp_path / 'copied')


@pytest.fixture(scope='module')
def continued(flags, short, tmp_path_factory):
    """A copy of it that went on to step 5 on a terminal; and what was to be seen there."""
    workdir = shutil.copytree(short.path, tmp_path_factory.mktemp('continued') / 'run')
    ours, theirs = pty.openpty()
    shown = []

    def read():
        with contextlib.suppress(OSError):  # the other end is closed
            while text := os.read(ours, 1 << 16):
                shown.append(text)

    reader = threading.Thread(target=read)
    reader.start()
    with (
        pytest.MonkeyPatch.context() as patch,
        open(theirs, 'w') as terminal,
        contextlib.redirect_stdout(terminal),
    ):
        for name, value in {'TERM': 'xterm', 'COLUMNS': '120', 'LINES': '40'}.items():
            patch.setenv(name, value)
        assert door(*flags, *SHORT, '--config.train.steps=5', f'--workdir={workdir}') == 0
    reader.join()
    os.close(ours)
    return Workdir(workdir), re.sub(r'\x1b\[[0-9;?]*[a-zA-Z]', '', b''.join(shown).decode())


@pytest.fixture(scope='module')
def fresh(flags, tmp_path_factory):
    """2 steps on 2 replicas without next-sentence prediction, in a process of its own; and the process."""
    workdir = tmp_path_factory.mktemp('fresh')
    words = overrides(train__steps=2, devices__replicas=2, model__next_sentence='false')
    result = in_a_process(*flags, *words, f'--workdir={workdir}')
    assert result.returncode == 0, result.stderr
    return Workdir(workdir), result


SHORT = overrides(train__steps=3, eval__at_start='true')
LONG = overrides(train__steps=12, devices__replicas=2, log__every=5, eval__every=4, checkpoint__every=6)


@pytest.mark.parametrize('stop_at', [3, *(pytest.param(step, marks=pytest.mark.slow) for step in (6, 10))])
def test_a_run_stopped_and_continued_is_the_run_never_stopped(flags, unbroken, tmp_path, stop_at):  # C29
    workdir = f'--workdir={tmp_path}'
    door_until(stop_at, *flags, *LONG, workdir)
    with open(tmp_path / 'metrics.jsonl', 'a') as stream:  # what a kill in mid-step and in mid-line leaves
        stream.write(json.dumps({'step': stop_at + 1, 'kind': 'train', 'loss': 1.0}) + '\n{"step": ')
    assert door(*flags, *LONG, workdir) == 0
    resumed = Workdir(tmp_path)
    assert without_rates(resumed.metrics) == without_rates(unbroken.metrics)
    for name, value in unbroken.tensors().items():
        if not name.startswith('save_counter'):
            assert np.array_equal(resumed.tensors()[name], value), name


def test_the_same_command_at_its_last_step_says_so(flags, copied, capsys):
    words = [*flags, *SHORT, f'--workdir={copied}']
    before = (copied / 'metrics.jsonl').read_text()
    assert door(*words) == 0
    assert 'Already at step 3 of 3' in capsys.readouterr().out
    assert (copied / 'metrics.jsonl').read_text() == before


def test_the_same_command_with_more_steps_goes_on(continued):
    run, text = continued
    assert 'from checkpoints/ckpt-3, at step 3 of 5' in text
    assert [line['step'] for line in run.lines('train')] == [1, 2, 3, 4, 5]


def test_fewer_steps_than_are_done_say_so_and_change_nothing(flags, copied, capsys):
    before = (copied / 'metrics.jsonl').read_text()
    assert door(*flags, *SHORT, f'--workdir={copied}', '--config.train.steps=2') == 0
    assert 'Already at step 3 of 2' in capsys.readouterr().out
    assert (copied / 'metrics.jsonl').read_text() == before


def test_a_changed_key_is_refused_and_nothing_is_touched(flags, copied, capsys):
    before = {path: path.read_bytes() for path in copied.rglob('*') if path.is_file()}
    assert door(*flags, *SHORT, f'--workdir={copied}', '--config.optimizer.learning_rate=0.5') == 2
    assert 'optimizer.learning_rate was 0.003 and is 0.5. Choose another --workdir' in capsys.readouterr().err
    assert {path: path.read_bytes() for path in copied.rglob('*') if path.is_file()} == before


@pytest.mark.parametrize('change', ['nothing', 'add a record', 'add a file', 'remove a file'])
def test_a_run_whose_training_files_changed_is_refused(flags, copied, tmp_path, capsys, change):
    """Not where they are counts, but what is in them."""
    words = [*write_shallow(tmp_path), '--config.model.dropout=0.1', *SHORT, f'--workdir={copied}']
    if change == 'add a file':
        (tmp_path / 'train-9.tfrecord').write_bytes((tmp_path / 'train-0.tfrecord').read_bytes())
    elif change == 'remove a file':
        (tmp_path / 'train-3.tfrecord').unlink()
    elif change == 'add a record':
        both = (tmp_path / 'train-0.tfrecord').read_bytes() + (tmp_path / 'train-1.tfrecord').read_bytes()
        (tmp_path / 'train-0.tfrecord').write_bytes(both)
    if change == 'nothing':
        assert door(*words) == 0
        return
    assert door(*words) == 2
    error = capsys.readouterr().err.strip()
    assert 'these are not the files that the run began with' in error and '\n' not in error


def test_the_run_directory_holds_what_other_programs_read(unbroken):
    config = unbroken.config
    assert config['data']['logical_shards'] == 8 and config['data']['shard_by'] == 'record'
    assert config['data']['train'].endswith('train-*.tfrecord')
    assert [(line['step'], line['kind']) for line in unbroken.metrics] == [
        (4, 'eval'), (5, 'train'), (8, 'eval'), (10, 'train'), (12, 'eval'),
    ]  # fmt: skip
    assert {'loss', 'examples_per_second', 'learning_rate', 'gradient_norm'} <= unbroken.lines('train')[0].keys()
    assert unbroken.lines('eval')[0].keys() == {
        'step', 'kind', 'loss', 'masked_lm_loss', 'masked_lm_accuracy', 'next_sentence_loss', 'next_sentence_accuracy',
    }  # fmt: skip
    names = unbroken.tensors()
    assert unbroken.tensors('step')['step/.ATTRIBUTES/VARIABLE_VALUE'] == 12
    suffix = '/.ATTRIBUTES/VARIABLE_VALUE'
    assert f'models/bert/transform_0/kernel{suffix}' in names
    assert f'optimizers/pretraining/bert_words_embeddings_momentum{suffix}' in names
    assert sorted(p.name for p in (unbroken.path / 'checkpoints').glob('*.index')) == ['ckpt-12.index', 'ckpt-6.index']


@pytest.mark.parametrize(
    'name, objectives, tag',
    [
        ('loss', ['pretraining'], 'loss/loss'),
        ('masked_lm_loss', ['pretraining'], 'loss/masked_lm_loss'),
        ('masked_lm_accuracy', ['pretraining'], 'metrics/masked_lm_accuracy'),
        ('gradient_norm', ['pretraining'], 'optimizer/gradient_norm'),
        ('pretraining_loss', ['pretraining'], 'loss/pretraining_loss'),
        ('examples_per_second', ['pretraining'], 'speed/examples_per_second'),
        ('nonfinite_steps', ['pretraining'], 'skipped/nonfinite_steps'),
        ('generator_learning_rate', ['discriminator', 'generator'], 'generator/learning_rate'),
        ('discriminator_loss', ['discriminator', 'generator'], 'discriminator/loss'),
        ('frechet_distance', ['discriminator', 'generator'], 'metrics/frechet_distance'),
    ],
)
def test_metrics_stand_in_groups_in_tensorboard(name, objectives, tag):
    assert tag_of(name, objectives) == tag


def test_tensorboard_loses_what_comes_again_after_a_kill_and_nothing_else(tmp_path):
    for start, steps in ((0, range(1, 8)), (4, range(5, 10))):
        tensorboard = TensorBoard(tmp_path, ['pretraining'])
        tensorboard.drop_after(start)
        for step in steps:
            tensorboard.scalars('train', step, {'loss': step + start / 10})
    assert written_in(tmp_path, 'train') == {
        (step, 'loss/loss'): pytest.approx(step + 0.4 * (step > 4)) for step in range(1, 10)
    }


def written_in(workdir, kind):
    """(step, tag) -> value of every scalar; none of them twice."""
    found = {}
    for path in (workdir / 'tensorboard' / kind).glob('events*'):
        for event in read_events(path):
            for value in event.summary.value:
                assert (event.step, value.tag) not in found
                found[event.step, value.tag] = float(tf.make_ndarray(value.tensor))
    return found


def test_what_an_evaluation_that_is_not_done_has_written_to_tensorboard_goes(tmp_path):
    """It comes again, at the step from which the run goes on; the report of that step does not."""
    tensorboard = TensorBoard(tmp_path, ['pretraining'])
    for kind in ('train', 'eval'):
        tensorboard.scalars(kind, 4, {'loss': 1.0})
    tensorboard.pictures(4, {'samples': np.zeros([8, 8, 1], np.uint8)})
    for evaluated, left in ((True, {'train', 'eval', 'pictures'}), (False, {'train'})):
        TensorBoard(tmp_path, ['pretraining']).drop_after(4, evaluated)
        assert {path.parent.name for path in tmp_path.rglob('events*') if len(list(read_events(path))) > 1} == left


def read_events(path):
    return tf.compat.v1.train.summary_iterator(str(path))


@pytest.mark.slow
def test_tensorboard_has_the_numbers_of_metrics_jsonl_once_after_a_signal_and_a_kill(flags, tmp_path):
    """Whatever the times of its files say."""
    words = [*flags, *overrides(train__steps=200, checkpoint__every=50, eval__every=40), f'--workdir={tmp_path}']
    with running(*words) as process:
        assert wait_for_step(process, 3)
        process.terminate()
        process.communicate()
    assert process.returncode == 75
    check_tensorboard(Workdir(tmp_path))
    with running(*words) as process:
        assert wait_for_step(process, 60)
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    for path in tmp_path.rglob('events*'):
        os.utime(path, (1, 1))
    assert door(*words) == 0
    assert [line['step'] for line in Workdir(tmp_path).lines('train')] == list(range(1, 201))
    check_tensorboard(Workdir(tmp_path))


def test_tensorboard_has_the_numbers_of_metrics_jsonl(unbroken):
    check_tensorboard(unbroken)


def check_tensorboard(run):
    for split in ('train', 'eval'):
        written = written_in(run.path, split)
        for line in run.lines(split):
            for name in set(line) - {'step', 'kind'}:
                assert written.pop((line['step'], tag_of(name, ['pretraining']))) == pytest.approx(line[name], rel=1e-6)
        assert written == {}  # and nothing else


def test_a_train_line_averages_the_objective_over_the_steps_since_the_last_line(flags, short, tmp_path):
    assert door(*flags, *SHORT, '--config.log.every=3', f'--workdir={tmp_path}') == 0
    each, (line,) = [line['loss'] for line in short.lines('train')], Workdir(tmp_path).lines('train')
    assert line['loss'] == pytest.approx(np.mean(each)) and len(set(each)) == 3


def test_evaluation_is_the_same_on_1_and_3_replicas(flags, short, tmp_path):
    """And in batches of 8 and of 6: of the initial weights."""
    words = overrides(train__steps=1, devices__replicas=3, train__global_batch_size=6, eval__at_start='true')
    assert door(*flags, *words, f'--workdir={tmp_path}') == 0
    results = [run.lines('eval')[0] for run in (short, Workdir(tmp_path))]
    assert [line['step'] for line in results] == [0, 0]
    for name in ('loss', 'masked_lm_loss', 'next_sentence_loss', 'masked_lm_accuracy', 'next_sentence_accuracy'):
        assert [r[name] for r in results] == pytest.approx([results[0][name]] * 2, rel=1e-6), name


@pytest.mark.slow
def test_a_mirrored_strategy_of_one_replica_is_the_one_device_strategy(flags, tmp_path):
    for strategy in ('one', 'mirrored'):
        words = overrides(train__steps=3, devices__strategy=strategy)
        assert door(*flags, *words, f'--workdir={tmp_path / strategy}') == 0
    one, mirrored = (Workdir(tmp_path / strategy) for strategy in ('one', 'mirrored'))
    assert without_rates(one.metrics) == without_rates(mirrored.metrics)


def test_an_evaluation_can_be_cut_to_some_global_batches(flags, tmp_path, capsys):
    assert door(*flags, *overrides(train__steps=1, eval__steps=1), f'--workdir={tmp_path}', '--dry_run') == 0
    assert '2 files, a sample of 8, drawn by train.seed, of 13 records' in capsys.readouterr().out


@pytest.mark.slow
def test_the_plan_says_how_other_steps_change_the_learning_rate(flags, copied, capsys):
    """It had come to 0; the next start is told nothing, for it has the steps of the one before."""
    assert door(*flags, *SHORT, f'--workdir={copied}', '--dry_run') == 0
    assert 'learning rate  ' not in capsys.readouterr().out
    words = [*flags, *SHORT, '--config.train.steps=6', f'--workdir={copied}']
    assert door(*words) == 0
    row = printed_after('learning rate  ', capsys.readouterr().out).strip()
    told = re.fullmatch(r'(\S+) in the next step, and not 0: linear to step 6, which was 3', row)
    (line,) = [line for line in Workdir(copied).lines('train') if line['step'] == 4]
    assert float(told[1]) == pytest.approx(line['learning_rate'], rel=1e-3) and line['learning_rate'] > 0
    assert door(*words, '--dry_run') == 0
    assert 'learning rate  ' not in capsys.readouterr().out


@pytest.mark.parametrize('replicas', [1, 4])
def test_the_plan_says_what_the_batch_size_means(flags, tmp_path, capsys, replicas):  # C17
    topology = overrides(devices__replicas=replicas, train__microbatches=2)
    assert door(*flags, *topology, f'--workdir={tmp_path}', '--dry_run') == 0
    out = capsys.readouterr().out
    plural = 's' * (replicas > 1)
    assert (
        f'8 examples a step = {replicas} replica{plural} x {8 // replicas} in 2 microbatches of {4 // replicas}' in out
    )
    assert not list(tmp_path.iterdir())


def test_a_dry_run_names_the_records_of_every_replica_and_they_are_disjoint(flags, tmp_path, capsys):  # C09
    topology = overrides(devices__replicas=4)
    assert door(*flags, *topology, f'--workdir={tmp_path}', '--dry_run') == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip().startswith('replica ')]
    fed = [re.findall(r'(train-\d\.tfrecord): ([\d ]+)', line) for line in lines]
    records = [{(file, n) for file, numbers in replica for n in numbers.split()} for replica in fed]
    assert len(records) == 4 and all(len(r) == 2 for r in records)
    assert len(set.union(*records)) == 8


@pytest.mark.parametrize(
    'words, said',
    [
        (overrides(train__global_batch_size=9, devices__replicas=2), 'does not divide over 2 replicas: take 8 or 10'),
        (overrides(train__microbatches=3), 'global_batch_size=8 does not divide over 1 replicas x 3 microbatches'),
        (overrides(data__train='nope*'), 'data.train=nope*: no file matches'),
        (overrides(data__logical_shards=3), 'data.logical_shards=3 must divide'),
        (overrides(data__shard_by='file', data__logical_shards=8), 'data.shard_by=file: 4 files are too few for'),
        (overrides(devices__all_reduce='nccl', devices__replicas=2), 'devices.all_reduce=nccl needs GPUs'),
        (overrides(devices__strategy='one', devices__replicas=2), 'devices.strategy=one has 1 replica'),
        (overrides(model__heads=3), 'model.heads=3 does not divide model.width=16'),
        (overrides(devices__replicas=8), 'TensorFlow has run something before the devices were made'),
    ],
)  # fmt: skip
def test_what_could_not_start_is_refused_by_a_dry_run_in_one_line(flags, tmp_path, capsys, words, said):
    assert door(*flags, *words, f'--workdir={tmp_path}', '--dry_run') == 2
    error = capsys.readouterr().err.strip()
    assert said in error and error.startswith('error: ') and '\n' not in error
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_of_another_model_is_refused_by_name(flags, copied, capsys):
    config = Workdir(copied).config
    for key, value in (('layers', 2), ('width', 32)):
        changed = {**config, 'model': {**config['model'], key: value}}
        (copied / 'config.json').write_text(json.dumps(changed))
        assert door(*flags, *SHORT, f'--config.model.{key}={value}', f'--workdir={copied}') == 2
        error = capsys.readouterr().err.strip()
        assert 'ckpt-3 does not fit this experiment' in error and '\n' not in error


def test_a_config_that_is_no_json_is_refused(flags, tmp_path, capsys):
    (tmp_path / 'config.json').write_text('{"train": ')
    assert door(*flags, f'--workdir={tmp_path}') == 2
    assert 'config.json is not JSON' in capsys.readouterr().err


def test_what_was_removed_from_a_workdir_is_said(flags, copied, capsys):
    shutil.rmtree(copied / 'checkpoints')
    assert door(*flags, *SHORT, f'--workdir={copied}') == 0
    assert 'metrics.jsonl tells of 3 steps, and there is no checkpoint of them' in ' '.join(
        capsys.readouterr().out.split()
    )
    (copied / 'config.json').unlink()
    assert door(*flags, *SHORT, f'--workdir={copied}') == 2
    assert 'has checkpoints and no config.json' in capsys.readouterr().err


def test_a_run_that_failed_before_its_first_step_binds_nothing(flags, tmp_path, capsys):
    with unittest.mock.patch.object(loop, '_train', side_effect=UserError('planted')):
        assert door(*flags, *SHORT, f'--workdir={tmp_path}') == 2
    run = Workdir(tmp_path)
    (tmp_path / 'metrics.jsonl').write_text('{"step": 0, "kind": "eval", "loss": -1.0}\n')
    (tmp_path / 'other').mkdir()
    other = write_shallow(tmp_path / 'other', [30, 31])
    assert door(*other, *SHORT, '--config.train.seed=7', f'--workdir={tmp_path}') == 0
    assert run.config['train']['seed'] == 7 and all(line['loss'] > 0 for line in run.lines('eval'))
    assert door(*other, *SHORT, f'--workdir={tmp_path}') == 2
    assert 'train.seed was 7 and is 0' in capsys.readouterr().err


@pytest.mark.slow
def test_next_sentence_off_trains_without_a_warning(fresh):  # C55
    run, process = fresh
    assert process.stderr == ''
    assert 'next_sentence_loss' not in run.lines('eval')[-1]


def test_bfloat16_computes_in_it_with_float32_weights(flags, short, tmp_path):
    assert door(*flags, *SHORT, '--config.train.precision=bfloat16', f'--workdir={tmp_path}') == 0
    runs = [short, Workdir(tmp_path)]
    assert {value.dtype for run in runs for value in run.weights.values()} == {np.dtype('float32')}
    float32, bfloat16 = ([line['loss'] for line in run.lines('train')] for run in runs)
    assert float32 == pytest.approx(bfloat16, rel=1e-2)
    assert float32 != pytest.approx(bfloat16, rel=1e-6)


@pytest.mark.slow
def test_the_door_in_a_fresh_process_is_quiet(fresh):
    _, quiet = fresh
    assert quiet.stderr == ''
    assert '2 replicas (MirroredStrategy) on CPU:0, CPU:1' in quiet.stdout
    assert re.search(r'^step 2/2  loss \d+\.\d+  \d+\.\d examples/s$', quiet.stdout, re.MULTILINE)


@pytest.mark.slow
def test_verbosity_brings_the_chatter_of_a_fresh_process_back(flags, tmp_path):
    loud = in_a_process(*flags, '--config.train.steps=2', '--verbosity=0', f'--workdir={tmp_path}')
    assert 'training until step 2' in loud.stderr


def test_on_a_terminal_there_is_a_progress_bar_with_step_loss_rate_and_time_left(continued):
    _, text = continued
    assert re.search(r'step 5/5 .*loss \d+\.\d+  \d+\.\d examples/s ETA 0:00:00', text)
    assert not re.search(r'^step 4/5  loss', text, re.MULTILINE)


def test_a_mistake_in_a_fresh_process_ends_with_exit_2_and_one_line(tmp_path):
    result = in_a_process('--experiment=bert_mml')
    assert result.returncode == 2
    assert result.stderr == 'error: --experiment=bert_mml: did you mean bert_mlm?\n'


@pytest.mark.slow
def test_a_users_file_that_makes_a_tensor_at_import_is_told_so_when_devices_are_needed(tmp_path):  # C33
    path = tmp_path / 'eager.py'
    path.write_text(
        'import tensorflow as tf\nfrom ctl.config import base_config\nx = tf.zeros([2])\n\n\n'
        'def get_config():\n    return base_config()\n\n\ndef make_experiment(config):\n    pass\n'
    )
    result = in_a_process(f'--experiment={path}', '--config.devices.replicas=2')
    assert result.returncode == 2
    assert 'TensorFlow has run something before the devices were made' in result.stderr
    assert result.stderr.count('\n') == 1


@pytest.mark.slow
def test_help_agrees_with_the_exit_code_and_goes_to_standard_output():
    result = in_a_process('--help')
    assert result.returncode == 0 and result.stderr == ''
    assert re.match(r'usage: .*-m ctl.train --experiment=NAME', result.stdout)


def test_ctl_imports_nothing_of_the_estimator():  # C41
    for path in (ROOT / 'ctl').rglob('*.py'):
        assert not re.search(r'tf\.(estimator|contrib)|tensorflow_estimator', path.read_text()), path


@pytest.mark.parametrize('what', ['a file', 'below a file'])
def test_a_workdir_that_cannot_be_one_is_refused(flags, tmp_path, capsys, what):
    (tmp_path / 'file').write_text('not a folder')
    workdir = tmp_path / 'file' if what == 'a file' else tmp_path / 'file' / 'run'
    assert door(*flags, '--config.train.steps=1', f'--workdir={workdir}') == 2
    error = capsys.readouterr().err.strip()
    assert str(workdir) in error and '\n' not in error


def test_a_cache_that_cannot_be_written_is_refused(flags, tmp_path, monkeypatch, capsys):
    (tmp_path / 'file').write_text('not a folder')
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'file'))
    assert door(*flags, '--dry_run', f'--workdir={tmp_path / "run"}') == 2
    assert 'set XDG_CACHE_HOME to a folder that can' in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize('older', [True, False])
def test_a_run_that_began_with_the_decay_of_lamb_elsewhere_is_told_so(flags, tmp_path, capsys, older):
    words = [*flags, *overrides(train__steps=1, optimizer__name='lamb'), f'--workdir={tmp_path / "run"}']
    assert door(*words) == 0
    if older:
        (tmp_path / 'run' / 'run.json').unlink()  # which workdirs had not, then
    capsys.readouterr()
    assert door(*words) == 0
    said = capsys.readouterr().out
    assert ('began when its weight decay was outside' in said) == older
    assert ('began when seeds had 32 bits' in said) == older


@pytest.mark.slow
def test_a_run_that_began_with_other_seeds_is_told_so_once(flags, tmp_path, capsys):
    words, note = [*flags, *overrides(train__steps=1), f'--workdir={tmp_path / "run"}'], tmp_path / 'run' / 'run.json'
    assert door(*words) == 0
    began = json.loads(note.read_text())
    del began['arithmetic']  # as the first versions of the note
    note.write_text(json.dumps(began))
    capsys.readouterr()
    words = [*words, *overrides(train__steps=2)]
    for told in (1, 0):
        assert door(*words) == 0
        assert capsys.readouterr().out.replace('\n', ' ').count('began when seeds had 32 bits') == told
