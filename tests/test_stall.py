"""A run that stands still says where and ends, whatever it is that holds it."""

import ctypes
import subprocess
import sys

import pytest

from ctl.runtime import stall
from tests.runs import DEADLINE, ROOT, overrides, write_shallow

STANDS_STILL = '''
"""The shallow BERT, whose {where} never comes to its end at step 5."""
import dataclasses, time, ctypes
import tensorflow as tf
from tests.shallow_bert import get_config, make_experiment as make

calls = []

def wait(records):
    calls.append(None)
    if len(calls) >= 6:
        {wait}
    return records

def held(batch):
    record = tf.numpy_function(wait, [batch['record']], tf.int64)
    return {{**batch, 'record': tf.ensure_shape(record, batch['record'].shape)}}

def make_experiment(config):
    experiment = make(config)
    (objective,) = experiment.objectives
    if {where!r} == 'input':
        return dataclasses.replace(experiment, prepare=held)
    def losses_of(batch, seed):
        if seed is not None:
            held_batch = held(batch)
            with tf.control_dependencies([held_batch['record']]):
                batch = {{name: tf.identity(value) for name, value in batch.items()}}
        return objective.losses(batch, seed)
    return dataclasses.replace(experiment, objectives=[dataclasses.replace(objective, losses=losses_of)])
'''
SLEEP = 'time.sleep(10_000)'
LOCK = 'ctypes.PyDLL(None).sleep(10_000)'  # does not let go of Python


def stand_still(tmp_path, where, wait):
    (tmp_path / 'still.py').write_text(STANDS_STILL.format(where=where, wait=wait))
    words = [f'--experiment={tmp_path / "still.py"}', *write_shallow(tmp_path)[1:], f'--workdir={tmp_path / "run"}']
    words += overrides(train__steps=50, eval__every=0, checkpoint__every=1, devices__stall_seconds=5)
    return subprocess.run(
        [sys.executable, '-m', 'ctl.train', *words], capture_output=True, text=True, timeout=DEADLINE, cwd=ROOT
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    'where, remedy',
    [
        ('step', 'for its devices, devices.stall_seconds=5 longer than the steps before took: look at the device'),
        ('input', 'for its input, devices.stall_seconds=5 longer than'),
    ],
)
def test_a_run_that_stands_still_says_where_and_what_to_try_and_ends_with_75(tmp_path, where, remedy):
    done = stand_still(tmp_path, where, SLEEP)
    assert done.returncode == 75, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith('stalled: ')]
    assert f' waits {remedy}' in line and 'Go on with: ' in line and str(tmp_path / 'run') in line
    if where == 'step':
        assert line.startswith('stalled: step 5 ')
    assert 'in wait' in done.stderr and 'orbit/controller.py' in done.stderr  # the stacks of all threads


@pytest.mark.slow
def test_a_run_that_keeps_python_locked_shows_its_stacks_and_ends_with_75_too(tmp_path):
    done = stand_still(tmp_path, 'step', LOCK)
    assert done.returncode == 75, done.stderr
    assert 'Timeout (' in done.stderr and 'in wait' in done.stderr


PROGRAM = """
import ctypes, sys, time
import tensorflow as tf
from ctl.runtime import stall
stall.LOCKED_SECONDS = 1.0
step = tf.Variable(7)
watch = stall.Watch(step, 1.0, 'Go on.', 'try another')
with watch.watching():
    for _ in range(200):
        with watch.loop(1, 0.001):
            pass
    time.sleep(3)  # between loops, as an evaluation
    with watch.loop(100, 0.03):
        time.sleep(3)  # as long as the steps before
    print('sound', flush=True)
    with watch.loop(1, 0.01):
        step.assign_add(2)
        {wait}
"""


@pytest.mark.parametrize(
    'wait, said',
    [
        (SLEEP, 'stalled: step 9 waits for its devices'),
        pytest.param(LOCK, 'Timeout (0:00:02', marks=pytest.mark.slow),
    ],
)
def test_only_a_loop_that_takes_too_long_is_ended(wait, said):
    done = subprocess.run(
        [sys.executable, '-c', PROGRAM.format(wait=wait)], capture_output=True, text=True, timeout=DEADLINE
    )
    assert (done.returncode, done.stdout) == (75, 'sound\n'), done.stderr
    assert said in done.stderr and 'File "<string>"' in done.stderr


def test_where_nothing_is_watched_no_thread_waits(monkeypatch):
    monkeypatch.setattr(stall.threading, 'Thread', None)
    watch = stall.Watch(None, 0, '', '')
    with watch.watching(), watch.loop(1, None):
        pass


@pytest.mark.parametrize('has', [None, 'librt.so.1', ''], ids=['libc', 'librt', 'nothing'])
def test_the_timer_is_found_where_the_system_has_it_and_a_run_goes_on_without(monkeypatch, has):
    """glibc before 2.34 has timers in a library of their own."""
    load = ctypes.CDLL

    class Without:
        _exit = load(None)._exit

    monkeypatch.setattr(ctypes, 'CDLL', lambda name: load(None) if name == has else Without())
    assert (stall._timers() is None) == (has == '')
    watch = stall.Watch(None, 1000, '', '')
    with watch.watching(), watch.loop(1, 0.1):
        pass


def test_the_timer_of_the_operating_system_is_described_as_it_wants():
    assert ctypes.sizeof(stall._Event) == 64
