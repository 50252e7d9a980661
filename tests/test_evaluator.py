"""An evaluation is known to be possible before the first step, loses none, and the best one keeps its checkpoint."""

import json
import shutil

import numpy as np
import pytest
import tensorflow as tf

from ctl.evaluator import Evaluator
from ctl.runtime import best as best_lib
from ctl.runtime import checkpoints as checkpoints_lib
from tests.runs import Stopped, Workdir, door, overrides, write_shallow

pytestmark = pytest.mark.xdist_group('evaluator')  # for the run that these tests share

EVERY_2 = overrides(train__steps=6, checkpoint__every=2, checkpoint__keep=3)


@pytest.fixture(scope='module')
def flags(tmp_path_factory):
    return write_shallow(tmp_path_factory.mktemp('data'))


@pytest.fixture(scope='module')
def finished(flags, tmp_path_factory):
    """6 steps, with checkpoints at 2, 4 and 6, and an evaluation at the end."""
    workdir = tmp_path_factory.mktemp('finished')
    assert door(*flags, *EVERY_2, f'--workdir={workdir}') == 0
    return workdir


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it, to go on with."""
    return shutil.copytree(finished, tmp_path / 'run')


def go_on(flags, run, steps):
    words = overrides(train__steps=steps, checkpoint__best_metric='loss')
    return door(*flags, *EVERY_2, *words, f'--workdir={run}')


@pytest.mark.parametrize(
    'metric, mode, better',
    [('masked_lm_accuracy', 'max', max), pytest.param('loss', 'min', min, marks=pytest.mark.slow)],
)
def test_the_checkpoint_of_the_best_evaluation_is_kept_besides(flags, tmp_path, metric, mode, better):
    words = overrides(
        train__steps=12, eval__every=2, checkpoint__every=12, checkpoint__best_metric=metric, checkpoint__best_mode=mode
    )
    # A rate that is far too high, so that the last is not the best.
    assert door(*flags, *words, '--config.optimizer.learning_rate=3.0', f'--workdir={tmp_path}') == 0
    lines = Workdir(tmp_path).lines('eval')
    best = better(lines, key=lambda line: line[metric])
    about, _ = best_of(tmp_path)
    assert about == {'step': best['step'], 'metric': metric, 'mode': mode, 'value': best[metric]}
    reader = tf.train.load_checkpoint(str(tmp_path / 'checkpoints' / 'best'))
    assert reader.get_tensor('step/.ATTRIBUTES/VARIABLE_VALUE') == best['step']


@pytest.mark.parametrize('how', [[], ['--dry_run']])
def test_a_best_metric_that_is_none_is_refused_before_the_first_step_with_the_nearest(flags, tmp_path, capsys, how):
    words = [*flags, *overrides(checkpoint__best_metric='masked_lm_los'), *how]
    assert door(*words, f'--workdir={tmp_path / "run"}') == 2
    assert 'checkpoint.best_metric=masked_lm_los: did you mean masked_lm_loss' in capsys.readouterr().err
    assert not (tmp_path / 'run').exists()


def best_of(run):
    """What best.json says, and the steps of the checkpoints beside it."""
    about = json.loads((run / 'checkpoints' / 'best' / 'best.json').read_text())
    assert about.pop('evaluation') == Workdir(run).config['data']['eval_digest']
    return about, sorted(path.stem for path in (run / 'checkpoints' / 'best').glob('*.index'))


def put_best(run, step, value, copies, **noted):
    """Into `best`, as if the evaluation of `step` had been the best: copies of checkpoints, which are moved there."""
    folder = run / 'checkpoints' / 'best'
    folder.mkdir()
    for number in copies:
        for path in (run / 'checkpoints').glob(f'ckpt-{number}.*'):
            shutil.copy(path, folder)
    (folder / 'best.json').write_text(json.dumps({'step': step, 'value': value, **noted}))


@pytest.mark.slow
def test_a_best_checkpoint_of_a_step_that_is_trained_again_is_no_longer_the_best(flags, run, capsys):
    """The newest checkpoints were lost, and with them what was written of the steps after."""
    put_best(run, 6, 0.0, copies=[6], metric='loss', mode='min')
    for path in (run / 'checkpoints').glob('ckpt-6.*'):
        path.unlink()
    assert go_on(flags, run, 5) == 0
    assert 'best held step 6, and the run goes on from step 4' in capsys.readouterr().out
    (line,) = Workdir(run).lines('eval')
    assert best_of(run) == ({'step': 5, 'metric': 'loss', 'mode': 'min', 'value': line['loss']}, ['ckpt-5'])


@pytest.mark.slow
def test_the_best_checkpoint_and_what_is_said_of_it_agree_after_a_kill_between_them(flags, run, monkeypatch):
    """And a best value that once was no number gives way to one."""
    noted = {'metric': 'loss', 'mode': 'min', 'evaluation': Workdir(run).config['data']['eval_digest']}
    put_best(run, 4, float('nan'), copies=[2, 4], **noted)  # as a kill would leave it too
    replace = best_lib.replace_text

    def stop(path, text):
        if path.name == 'best.json':
            raise KeyboardInterrupt
        replace(path, text)

    monkeypatch.setattr(best_lib, 'replace_text', stop)
    assert go_on(flags, run, 7) == 130
    about, steps = best_of(run)
    assert about['step'] == 4 and steps == ['ckpt-4', 'ckpt-7']
    monkeypatch.undo()
    assert go_on(flags, run, 7) == 0
    about, steps = best_of(run)
    assert about['step'] == 7 and steps == ['ckpt-7']


@pytest.mark.slow
@pytest.mark.parametrize(
    'noted, config, begins_anew',
    [
        ({'metric': 'loss', 'mode': 'max'}, 'min', True),
        ({'metric': 'loss', 'mode': 'min'}, 'max', False),
        ({'metric': 'accuracy', 'mode': 'min'}, 'min', True),
        ({'metric': 'loss'}, 'min', False),  # of an older version, which noted no mode: it is that of then
        ({'metric': 'loss'}, 'max', True),
        ({'metric': 'loss', 'mode': 'min', 'evaluation': 'of other records'}, 'min', True),
    ],
)
def test_a_best_by_another_metric_or_mode_is_said_and_compared_with_nothing(
    flags, run, capsys, noted, config, begins_anew
):
    """No loss is less than the one there."""
    put_best(run, 4, -1.0, copies=[4], **noted)
    before = json.loads((run / 'config.json').read_text())
    before['checkpoint']['best_mode'] = config
    (run / 'config.json').write_text(json.dumps(before))
    with pytest.MonkeyPatch.context() as patch:  # what was said is known to the next start, also if this one is killed
        patch.setattr(best_lib.BestCheckpoint, '__call__', stop_here)
        with pytest.raises(Stopped):
            go_on(flags, run, 7)
    assert go_on(flags, run, 7) == 0
    said = capsys.readouterr().out.count('gives way to the best loss by checkpoint.best_mode=min')
    assert said == 2 * begins_anew
    about, steps = best_of(run)
    assert about['mode'] == 'min' and about['metric'] == 'loss'
    assert about['step'] == (7 if begins_anew else 4) and steps == [f'ckpt-{about["step"]}']


def stop_here(*arguments):
    raise Stopped


def test_a_number_that_is_not_finite_is_never_the_best():
    class Checkpoints:
        best_folder, writes = None, 0

        def write_best(self):
            self.writes += 1

    checkpoints, kept = Checkpoints(), []
    best = best_lib.BestCheckpoint(checkpoints, best_lib.Contest('loss', 'min', ''), writes=False)
    for value in (np.nan, 3.0, np.nan, -np.inf, 2.0, 2.5):
        before = checkpoints.writes
        best({'loss': value})
        kept += [value] * (checkpoints.writes - before)
    assert kept == [3.0, 2.0]


def test_an_evaluation_that_fails_loses_no_step_and_comes_first_when_the_run_goes_on(flags, run, monkeypatch, capsys):
    evaluate, told = Evaluator.eval_end, [ZeroDivisionError, None, {'loss': np.nan}, None]

    def fail(self, totals):
        now = told.pop(0)
        if now is ZeroDivisionError:
            raise now
        return now or evaluate(self, totals)

    monkeypatch.setattr(Evaluator, 'eval_end', fail)
    words = [*flags, *overrides(train__steps=10, eval__every=4, checkpoint__every=100), f'--workdir={run}']
    with pytest.raises(ZeroDivisionError):
        door(*words)
    assert steps_in(run) == (8, [6])
    assert door(*words) == 3
    assert 'the evaluation at step 10 has the loss nan' in capsys.readouterr().err
    assert steps_in(run) == (10, [6, 8])
    assert door(*words) == 0
    assert steps_in(run) == (10, [6, 8, 10])
    assert [line['step'] for line in Workdir(run).lines('train')] == list(range(1, 11))


def steps_in(run):
    """Of the newest checkpoint, and of the evaluations."""
    newest = int(checkpoints_lib.newest_in(run / 'checkpoints').rpartition('-')[2])
    return newest, [line['step'] for line in Workdir(run).lines('eval')]
