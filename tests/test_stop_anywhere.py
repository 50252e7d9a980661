"""Invariant 3: signals and kills, at any moment, of the real command in a process of its own."""

import contextlib
import json
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from tests.runs import (
    DEADLINE,
    Workdir,
    door,
    overrides,
    running,
    wait_for_step,
    without_rates,
    words_for_the_door,
    write_shallow,
)

STEPS, LONG_STEPS, GAN_STEPS = 40, 150, 100
EVAL_EVERY = 10
LONG = overrides(
    train__steps=STEPS,
    devices__replicas=2,
    model__dropout=0.1,
    log__every=1,
    eval__every=EVAL_EVERY,
    checkpoint__every=5,
)


@pytest.fixture(scope='module')
def flags(tmp_path_factory):
    return write_shallow(tmp_path_factory.mktemp('data'), eval_counts=(60, 60)) + LONG


@pytest.fixture(scope='module')
def unbroken(flags, tmp_path_factory):
    workdir = tmp_path_factory.mktemp('unbroken')
    assert door(*flags, f'--workdir={workdir}') == 0
    return Workdir(workdir)


@pytest.fixture(scope='module')
def long_flags(flags):
    """Long enough to be killed ten times."""
    return [*flags, f'--config.train.steps={LONG_STEPS}']


@pytest.fixture(scope='module')
def long_unbroken(long_flags, tmp_path_factory):
    workdir = tmp_path_factory.mktemp('long_unbroken')
    assert door(*long_flags, f'--workdir={workdir}') == 0
    return Workdir(workdir)


def check_equal(found, unbroken):
    assert without_rates(found.metrics) == without_rates(unbroken.metrics)
    tensors = found.tensors()
    for name, value in unbroken.tensors().items():
        assert np.array_equal(tensors[name], value), name


def saved_step(workdir):
    return int(Workdir(workdir).tensors('step')['step/.ATTRIBUTES/VARIABLE_VALUE'])


@pytest.mark.xdist_group('stop')
@pytest.mark.parametrize(
    'number',
    [
        signal.SIGTERM,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)),
    ],
)
def test_a_signal_saves_and_ends_with_exit_75_and_the_same_command_goes_on(flags, unbroken, tmp_path, number):
    words = [*flags, f'--workdir={tmp_path}']
    with running(*words) as process:
        assert wait_for_step(process, 12)
        process.send_signal(number)
        error = process.communicate()[1]
    assert process.returncode == 75
    step = saved_step(tmp_path)
    assert 12 <= step < STEPS
    assert error.startswith(f'{number.name} received: saved at step {step}. Go on with: ')
    assert error.count('\n') == 1 and words_for_the_door(error) == words
    assert not (tmp_path / 'lock').exists()
    assert door(*words) == 0
    check_equal(Workdir(tmp_path), unbroken)


@contextlib.contextmanager
def a_signal_in_every_evaluation():
    """It comes in the first batch."""
    from ctl import evaluator
    from ctl.runtime import signals

    stops = []
    init, reduce = signals.Stop.__init__, evaluator.Evaluator.eval_reduce

    def remember(self):
        init(self)
        stops.append(self)

    def ask_to_stop(self, *arguments):
        stops[-1].received = 'SIGTERM'
        return reduce(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signals.Stop, '__init__', remember)
        patch.setattr(evaluator.Evaluator, 'eval_reduce', ask_to_stop)
        yield


@pytest.mark.slow
@pytest.mark.xdist_group('stop')
def test_a_signal_in_an_evaluation_saves_and_the_evaluation_comes_when_the_run_goes_on(flags, unbroken, tmp_path):
    """It comes in the first batch of the evaluation of step 10."""
    words = [*flags, f'--workdir={tmp_path}']
    with a_signal_in_every_evaluation():
        assert door(*words) == 75
    assert saved_step(tmp_path) == EVAL_EVERY
    assert Workdir(tmp_path).lines('eval') == []
    assert door(*words) == 0
    check_equal(Workdir(tmp_path), unbroken)


@pytest.mark.slow
@pytest.mark.xdist_group('stop')
def test_a_signal_in_the_same_evaluation_again_and_in_the_last_loses_none(flags, tmp_path):
    """The evaluation that the first start was interrupted in is the first thing that the second one does."""
    words = [*flags, f'--config.train.steps={EVAL_EVERY}', f'--workdir={tmp_path}']
    with a_signal_in_every_evaluation():
        assert [door(*words) for _ in range(2)] == [75, 75]
    assert Workdir(tmp_path).lines('eval') == []
    assert door(*words) == 0
    assert [line['step'] for line in Workdir(tmp_path).lines('eval')] == [EVAL_EVERY]


@pytest.mark.slow
@pytest.mark.xdist_group('stop')
def test_a_signal_before_the_first_step_ends_with_exit_75_and_says_so(flags, tmp_path):
    with running(*flags, f'--workdir={tmp_path}') as process:
        for line in process.stdout:
            if 'resumed' in line:  # the plan is printed, and nothing is traced yet
                process.send_signal(signal.SIGINT)
                break
        error = process.communicate()[1]
    assert process.returncode == 75
    assert error.startswith('SIGINT received: ')


BUSY = """
import time
from ctl.runtime import signals
with signals.Stop().watching():
    print('busy', flush=True)
    time.sleep(3600)
"""


def test_a_second_signal_ends_the_run_at_once_whatever_it_is_doing():
    """The main thread hears of none: it is in a call that goes on for an hour."""
    with subprocess.Popen(
        [sys.executable, '-c', BUSY], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        watchdog = threading.Timer(DEADLINE, process.kill)
        watchdog.start()
        assert process.stdout.readline() == 'busy\n'
        while process.poll() is None:  # two signals at the same instant are one
            process.send_signal(signal.SIGTERM)
            time.sleep(0.05)
        error = process.communicate()[1]
        watchdog.cancel()
    assert process.returncode == 128 + signal.SIGTERM
    assert error == 'SIGTERM received after SIGTERM: ended at once.\n'


HEARS = """
import signal, time
from ctl.runtime import signals
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup starts a program
with signals.Stop().watching() as stop:
    print('up', flush=True)
    while not stop.asked:
        time.sleep(0.01)
    print(stop.received)
"""


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2])
def test_what_was_ignored_at_the_start_stays_ignored_and_all_others_end_a_run(number):  # N29
    with subprocess.Popen([sys.executable, '-c', HEARS], stdout=subprocess.PIPE, text=True) as process:
        watchdog = threading.Timer(DEADLINE, process.kill)
        watchdog.start()
        assert process.stdout.readline() == 'up\n'
        process.send_signal(signal.SIGHUP)
        process.send_signal(number)
        said = process.communicate()[0]
        watchdog.cancel()
    assert said == f'{number.name}\n' and process.returncode == 0


def kill_somewhere(process, workdir, where, rng):
    """Lets a run come to a moment of the kind `where`, and kills it there; whether it had not ended before."""
    begun = saved_step(workdir) if list(workdir.glob('checkpoints/*.index')) else 0
    if where == 'start-up':
        time.sleep(rng.uniform(0, 9))
    elif where == 'training':
        wait_for_step(process, begun + rng.randrange(1, EVAL_EVERY))
        time.sleep(rng.uniform(0, 0.1))
    elif where == 'evaluation':
        wait_for_step(process, (begun // EVAL_EVERY + 1) * EVAL_EVERY)
        time.sleep(rng.uniform(0, 0.02))
    else:
        wait_for_step(process, begun + rng.randrange(1, EVAL_EVERY))
        there = set(workdir.glob('checkpoints/*'))  # the first file of the next save is one more
        while process.poll() is None and set(workdir.glob('checkpoints/*')) <= there:
            time.sleep(0.0005)
    process.kill()
    process.communicate()
    return process.returncode == -signal.SIGKILL


def check_kills(flags, unbroken, workdir, moments, seed):
    rng, words = random.Random(seed), [*flags, f'--workdir={workdir}']
    killed = []
    for where in moments:
        with running(*words) as process:
            killed.append(kill_somewhere(process, workdir, where, rng))
    assert any(killed)
    with running(*words) as process:
        error = process.communicate()[1]
    assert process.returncode == 0, error
    check_equal(Workdir(workdir), unbroken)


@pytest.mark.slow
@pytest.mark.xdist_group('stop')
def test_a_run_killed_again_and_again_is_the_run_never_killed(flags, unbroken, tmp_path):
    check_kills(flags, unbroken, tmp_path, ['evaluation', 'save'], seed=0)


@pytest.fixture(scope='module')
def gan_flags():
    """gan_digits, small, on its own data; two players, each update with a batch of its own."""
    return ['--experiment=gan_digits'] + overrides(
        train__steps=GAN_STEPS,
        train__global_batch_size=16,
        train__fresh_batches='true',
        discriminator__updates=2,
        model__generator_width=4,
        model__discriminator_width=4,
        model__generator_norm='batch',
        devices__replicas=2,
        log__every=1,
        eval__every=EVAL_EVERY,
        checkpoint__every=5,
    )


@pytest.fixture(scope='module')
def gan_unbroken(gan_flags, tmp_path_factory):
    workdir = tmp_path_factory.mktemp('unbroken_gan')
    assert door(*gan_flags, f'--workdir={workdir}') == 0
    return Workdir(workdir)


@pytest.mark.slow
@pytest.mark.parametrize('experiment', ['bert', 'gan'])
@pytest.mark.parametrize('seed', [1, 2, 3])
def test_a_run_killed_at_thirty_moments_is_the_run_never_killed(request, tmp_path, experiment, seed):
    """Ten for each seed."""
    names = ('long_flags', 'long_unbroken') if experiment == 'bert' else ('gan_flags', 'gan_unbroken')
    flags, unbroken = map(request.getfixturevalue, names)
    moments = [*['start-up', 'training', 'save', 'evaluation'] * 2, 'save', 'save']
    check_kills(flags, unbroken, tmp_path, moments, seed)


@pytest.mark.xdist_group('stop')
def test_metrics_of_the_killed_are_json_and_have_every_step_once(unbroken):
    lines = [json.loads(line) for line in (unbroken.path / 'metrics.jsonl').read_text().splitlines()]
    assert [line['step'] for line in lines if line['kind'] == 'train'] == list(range(1, STEPS + 1))


@pytest.mark.parametrize('same_seconds, exits', [(60, []), (-1, [128 + signal.SIGINT])])
def test_signals_at_once_are_one_wish_and_a_later_one_is_another(monkeypatch, same_seconds, exits):
    """`timeout` and `uv run` both pass on a signal: that is no second one."""
    import socket

    from ctl.runtime import signals

    found = []
    monkeypatch.setattr(signals, 'SAME_SECONDS', same_seconds)
    monkeypatch.setattr(signals.os, '_exit', found.append)
    ours, theirs = socket.socketpair()
    theirs.send(bytes([signal.SIGTERM, signal.SIGINT]))
    theirs.close()
    stop = signals.Stop()
    stop._listen(ours)
    assert stop.received == 'SIGTERM' and found == exits
