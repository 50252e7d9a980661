"""What every test of a process shares: one TensorFlow session of four virtual CPU devices, and places of its own."""

import gc
import os
import pathlib
import signal
import sys
import tempfile

import hypothesis
import hypothesis.configuration
import pytest

# Where Python is told to keep no bytecode, as in many containers, every program that a test starts would compile
# TensorFlow anew, for six seconds. It is kept while the tests run: worker processes and programs inherit the place.
if sys.dont_write_bytecode:
    _bytecode = tempfile.TemporaryDirectory(prefix='ctl-bytecode-')
    sys.pycache_prefix = os.environ['PYTHONPYCACHEPREFIX'] = _bytecode.name
    sys.dont_write_bytecode = False
    os.environ.pop('PYTHONDONTWRITEBYTECODE', None)

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
# No test sees a GPU, so that they are the same everywhere; programs that the group `gpu` starts are given back what is
# noted here.
os.environ.setdefault('CTL_TEST_GPUS', os.environ.get('CUDA_VISIBLE_DEVICES', 'all'))
os.environ['CUDA_VISIBLE_DEVICES'] = '-1'

import tensorflow as tf  # noqa: E402

# At import, because a test module may make a tensor when it is collected.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices('CPU')[0], [tf.config.LogicalDeviceConfiguration()] * 4
)


# Two noisy cores: how long an example takes says nothing.
hypothesis.settings.register_profile(
    'ctl',
    deadline=None,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.filter_too_much],
)
hypothesis.settings.load_profile('ctl')
# Nor is anything kept, from the moment that tests are collected: where it can make no folder, hypothesis goes without.
hypothesis.configuration.set_hypothesis_home_dir(os.devnull)


# Groups that take minutes, each on one worker process: they begin first, so that none ends alone.
LONG_GROUPS = ('workers', 'unbroken', 'stop', 'checkpoints', 'digits', 'lamb', 'elastic', 'averaged')


def pytest_collection_modifyitems(items):
    def rank(item):
        marks = [mark.args[0] for mark in item.iter_markers('xdist_group')]
        return min((LONG_GROUPS.index(name) for name in marks if name in LONG_GROUPS), default=len(LONG_GROUPS))

    items.sort(key=rank)


def pytest_collection_finish():
    """As ctl's programs do, but before a test has made anything: what is frozen is never collected."""
    gc.collect()
    gc.freeze()


ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture(scope='session', autouse=True)
def signals_as_in_a_terminal():
    """What nohup, or a shell's `&`, has told us to ignore is heard again by programs that tests start."""
    ignored = [each for each in (signal.SIGHUP, signal.SIGINT) if signal.getsignal(each) is signal.SIG_IGN]
    for each in ignored:
        signal.signal(each, lambda *_: None)  # we go on ignoring it; what we start begins with the default
    yield
    for each in ignored:
        signal.signal(each, signal.SIG_IGN)


@pytest.fixture(autouse=True)
def no_determinism_for_the_tests_to_come(monkeypatch):
    """TensorFlow cannot take it back: a test that wants it starts a process, and others note that it was asked for."""
    monkeypatch.setattr(tf.config.experimental, 'enable_op_determinism', lambda: None)


@pytest.fixture(scope='session', autouse=True)
def cache_of_its_own(tmp_path_factory):
    """A home, a cache, a place for temporary files, and a working folder, for all tests of this process."""
    base = tmp_path_factory.getbasetemp()
    places = {'HOME': 'home', 'XDG_CACHE_HOME': 'cache', 'TMPDIR': 'tmp'}
    with pytest.MonkeyPatch.context() as patch:
        for variable, name in places.items():
            (base / name).mkdir()
            patch.setenv(variable, str(base / name))
        # Programs that tests start find us from the folders that they are started in.
        patch.setenv('PYTHONPATH', str(ROOT))
        patch.setenv('UV_NO_SYNC', '1')  # and install nothing
        patch.setattr(tempfile, 'tempdir', None)
        (base / 'work').mkdir()
        patch.chdir(base / 'work')
        _watched.append(base)
        yield base / 'cache'
        _watched.clear()


@pytest.fixture(autouse=True)
def folder_of_its_own(cache_of_its_own, tmp_path_factory, monkeypatch):
    """Every test begins in an empty folder, and fails when it has written to another's."""
    monkeypatch.chdir(tmp_path_factory.mktemp('cwd'))
    yield
    touched = touched_outside[:]  # by the fixtures that several tests share, too
    touched_outside.clear()
    assert not touched, f'written outside of the folders of the tests: {touched}'


# What this process has written to, made, renamed or removed outside of the folders of the tests.
touched_outside: list[str] = []
_watched: list[pathlib.Path] = []  # the folder of the tests, while they run
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
# Devices and /proc are no files; what Python compiles is no test's doing.
_HARMLESS = ('/dev/', '/proc/', *([f'{sys.pycache_prefix}{os.sep}'] if sys.pycache_prefix else []))


def _look(event: str, arguments: tuple) -> None:
    """Python's audit hook: called for every file that is opened, made, renamed or removed. Cannot be taken away."""
    if not _watched:
        return
    if event == 'open':
        path, _, how = arguments
        paths = [path] if how & _WRITES else []
    elif event in ('os.mkdir', 'os.remove', 'os.rmdir', 'os.truncate'):
        paths = arguments[:1]
    elif event == 'os.rename':
        paths = arguments[:2]
    elif event in ('os.link', 'os.symlink'):
        paths = arguments[1:2]
    else:
        return
    for path in paths:
        if isinstance(path, str | bytes | os.PathLike):
            place = os.path.abspath(os.fsdecode(path))
            inside = place.startswith((f'{_watched[0]}{os.sep}', *_HARMLESS)) or '__pycache__' in place
            if not inside:
                touched_outside.append(place)


sys.addaudithook(_look)
