"""A run finds its way back to the newest sound checkpoint, or begins with another run's weights."""

import os
import pathlib
import re
import resource
import shutil

import numpy as np
import pytest
import tensorflow as tf

from ctl.runtime import checkpoints as checkpoints_lib
from ctl.runtime import state
from tests.runs import Workdir, door, overrides, write_shallow

pytestmark = pytest.mark.xdist_group('checkpoints')  # for the run that these tests share

EVERY_2 = overrides(train__steps=6, checkpoint__every=2, checkpoint__keep=3)


@pytest.fixture(scope='module')
def flags(tmp_path_factory):
    return write_shallow(tmp_path_factory.mktemp('data')) + ['--config.model.dropout=0.1']


@pytest.fixture(scope='module')
def finished(flags, tmp_path_factory):
    """6 steps, with checkpoints at 2, 4 and 6."""
    workdir = tmp_path_factory.mktemp('finished')
    assert door(*flags, *EVERY_2, f'--workdir={workdir}') == 0
    return workdir


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it, to damage."""
    shutil.copytree(finished, tmp_path / 'run')
    return tmp_path / 'run'


@pytest.mark.slow
@pytest.mark.parametrize('name', ['lr[0.1]', 'a*?,b \\c'])
def test_a_workdir_whose_name_tensorflow_takes_for_a_pattern_is_written_and_read(
    flags, finished, tmp_path, name
):  # N21
    shutil.copytree(finished, tmp_path / name)
    assert go_on(flags, tmp_path / name) == 0
    assert checkpoints_lib.find_checkpoint(str(tmp_path / name)).endswith('/ckpt-8')
    words = overrides(train__init_checkpoint=str(tmp_path / name), train__steps=1)
    assert door(*flags, *words, f'--workdir={tmp_path / "other"}') == 0


def test_a_checkpoint_in_a_folder_that_looks_like_a_pattern_is_read(finished, tmp_path):
    shutil.copytree(finished, tmp_path / 'lr[0.1]*')
    newest = checkpoints_lib.find_checkpoint(str(tmp_path / 'lr[0.1]*'))
    assert newest.endswith('lr[0.1]*/checkpoints/ckpt-6') and state.damage(newest) is None
    hurt(pathlib.Path(f'{newest}.index'), 'cut')
    assert state.damage(newest)


def go_on(flags, workdir, steps=8):
    return door(*flags, *EVERY_2, f'--config.train.steps={steps}', f'--workdir={workdir}')


def hurt(path, how):
    data = bytearray(path.read_bytes())
    if how == 'flipped':
        data[len(data) // 2] ^= 1
    elif how == 'cut':
        data = data[: len(data) // 2]
    else:
        data = b''
    path.write_bytes(data)


@pytest.mark.parametrize(
    'part, how',
    [
        ('data-00000-of-00001', 'flipped'),
        *(pytest.param('data-00000-of-00001', how, marks=pytest.mark.slow) for how in ('cut', 'empty', 'removed')),
        *(pytest.param('index', how, marks=pytest.mark.slow) for how in ('cut', 'flipped', 'empty', 'removed')),
    ],
)
def test_a_damaged_newest_checkpoint_is_set_aside_and_the_one_before_is_used(flags, run, capsys, part, how):
    path = run / 'checkpoints' / f'ckpt-6.{part}'
    if how == 'removed':
        path.unlink()
    else:
        hurt(path, how)
    assert go_on(flags, run) == 0
    captured = capsys.readouterr()
    if (part, how) != ('index', 'removed'):  # without its index it is no checkpoint, but what a kill leaves
        assert 'WARNING: ' in captured.out and 'ckpt-6 is damaged' in captured.out
        assert 'going on from step 4' in captured.out
        assert (run / 'checkpoints' / 'damaged').is_dir()
    assert 'from checkpoints/ckpt-4, at step 4 of 8' in captured.out
    assert [line['step'] for line in Workdir(run).lines('train')] == list(range(1, 9))


def test_a_dry_run_names_a_damaged_checkpoint_and_leaves_it(flags, run, capsys):
    hurt(run / 'checkpoints' / 'ckpt-6.index', 'cut')
    before = {path: path.read_bytes() for path in run.rglob('*') if path.is_file()}
    assert door(*flags, *EVERY_2, f'--workdir={run}', '--dry_run') == 0
    assert 'ckpt-6 is damaged' in capsys.readouterr().out
    assert {path: path.read_bytes() for path in run.rglob('*') if path.is_file()} == before


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_and_does_not_begin_again(flags, run, capsys):
    for path in (run / 'checkpoints').glob('*.index'):
        hurt(path, 'cut')
    assert go_on(flags, run) == 2
    error = capsys.readouterr().err.strip()
    assert 'there is no sound checkpoint before it' in error and '\n' not in error
    assert len(list((run / 'checkpoints').glob('*.index'))) == 3


def test_what_a_kill_in_the_middle_of_a_save_leaves_is_removed(flags, run):
    folder = run / 'checkpoints'
    (folder / 'ckpt-8.data-00000-of-00001').write_bytes(b'half')
    (folder / 'ckpt-8.data-00000-of-00001.tempstate123').write_bytes(b'half')
    assert go_on(flags, run) == 0
    assert sorted(path.name for path in folder.glob('ckpt-8.*')) == ['ckpt-8.data-00000-of-00001', 'ckpt-8.index']


def test_a_checkpoint_that_cannot_be_read_back_stops_the_run_and_the_one_before_is_intact(
    flags, run, monkeypatch, capsys
):
    write = tf.train.Checkpoint.write

    def write_badly(self, path):
        write(self, path)
        with open(f'{path}.data-00000-of-00001', 'r+b') as stream:
            stream.truncate(10)

    monkeypatch.setattr(tf.train.Checkpoint, 'write', write_badly)
    assert go_on(flags, run) == 3
    error = capsys.readouterr().err.strip()
    assert 'ckpt-8 cannot be written' in error and 'ckpt-6 is intact' in error and '\n' not in error
    monkeypatch.undo()
    assert go_on(flags, run) == 0
    assert [line['step'] for line in Workdir(run).lines('train')] == list(range(1, 9))


def test_a_disk_that_is_full_for_the_metrics_is_named_too(flags, run, monkeypatch, capsys):
    import errno

    from ctl.runtime import workdir

    def append(self, **values):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    monkeypatch.setattr(workdir.MetricsFile, 'append', append)
    assert go_on(flags, run) == 3
    error = capsys.readouterr().err.strip()
    assert 'metrics.jsonl cannot be written: No space left' in error and 'ckpt-6' in error and '\n' not in error


@pytest.mark.parametrize('in_background', ['true', pytest.param('false', marks=pytest.mark.slow)])
def test_a_full_disk_is_named_and_the_checkpoint_before_is_intact(flags, run, capsys, in_background):
    """A limit on the size of files stands for the end of the disk: the write fails in the same place."""
    import signal

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, before[1]))
        words = [*EVERY_2, *overrides(train__steps=8, checkpoint__async_save=in_background)]
        assert door(*flags, *words, f'--workdir={run}') == 3
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    error = capsys.readouterr().err.strip()
    assert 'ckpt-8 cannot be written' in error and 'ckpt-6 is intact' in error and '\n' not in error
    assert checkpoints_lib.find_checkpoint(str(run)) == str(run / 'checkpoints' / 'ckpt-6')


def test_saving_in_the_background_saves_the_same(flags, finished, tmp_path):
    assert door(*flags, *EVERY_2, '--config.checkpoint.async_save=true', f'--workdir={tmp_path}') == 0
    at_once, behind = Workdir(finished).tensors(), Workdir(tmp_path).tensors()
    assert at_once.keys() == behind.keys()
    for name, value in at_once.items():
        assert np.array_equal(value, behind[name]), name
    assert {path.name for path in (tmp_path / 'checkpoints').iterdir()} == {
        path.name for path in (finished / 'checkpoints').iterdir()
    }


@pytest.fixture
def disk(monkeypatch):
    """What is done to files from now on, in order: ('sync', 'rename' or 'remove', path, all that is under it)."""
    done = []

    def note(what, path):
        path = pathlib.Path(path)
        done.append((what, path, [path, *path.rglob('*')] if path.is_dir() else [path]))

    def noted(name, what, place):
        function = getattr(os, name)

        def call(*arguments, **named):
            if not named:  # rmtree names folders by number: scratch
                note(what, place(arguments[0]))
            return function(*arguments, **named)

        monkeypatch.setattr(os, name, call)

    noted('fsync', 'sync', lambda handle: os.readlink(f'/proc/self/fd/{handle}'))
    noted('replace', 'rename', lambda path: path)
    noted('rename', 'rename', lambda path: path)
    noted('unlink', 'remove', lambda path: path)
    return done


@pytest.mark.parametrize('in_background', ['true', pytest.param('false', marks=pytest.mark.slow)])
def test_the_disk_has_all_of_a_file_before_it_is_renamed_and_a_checkpoint_before_an_older_one_goes(
    flags, tmp_path, disk, in_background
):
    words = overrides(train__steps=4, eval__every=2, checkpoint__every=2, checkpoint__keep=1,
                      checkpoint__best_metric='loss', checkpoint__async_save=in_background)  # fmt: skip
    assert door(*flags, *words, f'--workdir={tmp_path}') == 0
    renamed, removed = set(), set()
    for number, (what, path, under) in enumerate(disk):
        synced = {each for did, each, _ in disk[:number] if did == 'sync'}
        if what == 'rename':
            assert set(under) <= synced, path
            assert ('sync', path.parent) in [(did, each) for did, each, _ in disk[number:]]
            renamed.add(path.name)
        elif what == 'remove' and (old := re.fullmatch(r'ckpt-(\d+)\..*', path.name)):
            new = f'ckpt-{int(old[1]) + 2}'
            assert {path.with_name(f'{new}.index'), path.with_name(f'{new}.data-00000-of-00001')} <= synced
            assert {path.parent, path.parent.parent, tmp_path / 'metrics.jsonl'} <= synced
            removed.add(path.name)
    assert {'.config.json.new', '.run.json.new', '.time.json.new', '.best.json.new'} <= renamed
    assert removed == {'ckpt-2.index', 'ckpt-2.data-00000-of-00001'}


def test_the_newest_are_kept_and_other_programs_find_the_last(finished):
    folder = finished / 'checkpoints'
    assert sorted(path.name for path in folder.glob('*.index')) == ['ckpt-2.index', 'ckpt-4.index', 'ckpt-6.index']
    assert tf.train.latest_checkpoint(str(folder)) == str(folder / 'ckpt-6')


@pytest.mark.parametrize(
    'named, checkpoint', [('', 'ckpt-6'), ('checkpoints', 'ckpt-6'), ('checkpoints/ckpt-4', 'ckpt-4')]
)
def test_a_checkpoint_is_named_by_its_run_by_its_folder_or_by_itself(finished, named, checkpoint):
    assert checkpoints_lib.find_checkpoint(str(finished / named)) == str(finished / 'checkpoints' / checkpoint)


def test_a_warm_start_takes_the_weights_and_nothing_else_and_goes_on_with_its_own(
    flags, finished, tmp_path, capsys
):  # C56
    path = finished / 'checkpoints' / 'ckpt-4'
    words = overrides(train__init_checkpoint=path, optimizer__learning_rate=0.0, train__seed=5)
    assert door(*flags, *words, '--config.train.steps=1', f'--workdir={tmp_path}') == 0
    out = ' '.join(capsys.readouterr().out.split())
    assert 'warm start weights of' in out and 'step 0 and fresh optimizer slots' in out
    found = Workdir(tmp_path)
    assert [line['step'] for line in found.lines('train')] == [1]
    reader = tf.train.load_checkpoint(str(path))
    for name, value in found.weights.items():
        assert np.array_equal(value, reader.get_tensor(name)), name
    # The same command with more steps goes on with its own checkpoint.
    assert door(*flags, *words, '--config.train.steps=2', f'--workdir={tmp_path}', '--dry_run') == 0
    out = capsys.readouterr().out
    assert 'from checkpoints/ckpt-1, at step 1 of 2' in out and 'warm start' not in out


@pytest.mark.parametrize(
    'path, model, said',
    [
        ('nowhere', {}, 'nowhere: no checkpoint is there. Name ckpt-<step>'),
        (None, {'model__width': 32}, 'has shape [5, 16] in it, and [5, 32] here'),
        (None, {'model__layers': 2}, 'it lacks models/bert/transform_1'),
    ],
)
def test_a_warm_start_that_does_not_fit_is_refused_by_name(flags, finished, tmp_path, capsys, path, model, said):
    words = overrides(train__steps=1, train__init_checkpoint=path or finished, **model)
    assert door(*flags, *words, f'--workdir={tmp_path / "run"}') == 2
    error = capsys.readouterr().err.strip()
    assert 'train.init_checkpoint=' in error and '\n' not in error
    if path or 'layers' in str(model):
        assert said in error
    else:
        assert 'has shape' in error
    assert not (tmp_path / 'run').exists()


def test_a_workdir_that_cannot_be_made_is_refused(flags, tmp_path, capsys):
    (tmp_path / 'file').touch()
    assert door(*flags, f'--workdir={tmp_path / "file" / "run"}') == 2
    error = capsys.readouterr().err.strip()
    assert f'--workdir={tmp_path}/file/run: cannot be written' in error and '\n' not in error
    assert os.listdir(tmp_path) == ['file']


def test_a_disk_without_room_for_the_checkpoints_is_warned_of(flags, tmp_path, monkeypatch, capsys):
    words = [*flags, '--dry_run', f'--workdir={tmp_path / "not" / "there" / "yet"}']
    assert door(*words) == 0
    assert 'WARNING' not in capsys.readouterr().out
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: usage._replace(free=1 << 14))
    assert door(*words) == 0
    assert 'the checkpoints that checkpoint.keep keeps need' in capsys.readouterr().out


@pytest.mark.parametrize('keep, best, in_background, copies', [
    (3, '', 'false', 4), (3, 'loss', 'false', 5), (3, '', 'true', 4), (3, 'loss', 'true', 6),
])  # fmt: skip
def test_the_room_that_is_asked_for_is_that_of_the_kept_the_best_and_those_being_written(
    flags, tmp_path, monkeypatch, capsys, keep, best, in_background, copies
):
    asked = []
    needed = checkpoints_lib.Checkpoints.bytes_needed.fget
    monkeypatch.setattr(
        checkpoints_lib.Checkpoints,
        'bytes_needed',
        property(lambda self: asked.append(needed(self) / self.state.bytes) or needed(self)),
    )
    words = overrides(checkpoint__keep=keep, checkpoint__best_metric=best, checkpoint__async_save=in_background)
    assert door(*flags, *words, '--dry_run', f'--workdir={tmp_path}') == 0
    assert asked == [copies]
