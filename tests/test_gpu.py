"""What only GPUs show: run by a person who has some, `pytest -m gpu`; skipped where TensorFlow finds none.

Every program is a process of its own, since the tests' own sees no GPU.
"""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tests.runs import DEADLINE, Workdir, overrides, relative_difference, write_data

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group('gpu')]

COUNT = 'import tensorflow as tf; print(len(tf.config.list_physical_devices("GPU")))'

# A run, and then what it took of the GPUs.
TAKEN = """
import sys
import tensorflow as tf
from ctl import train
assert train.main(sys.argv[1:]) == 0
gpus = tf.config.get_visible_devices('GPU')
print('visible', len(gpus), 'grow', sum(map(tf.config.experimental.get_memory_growth, gpus)))
"""

# A run, and a trace of where its time goes.
TRACED = """
import sys
import tensorflow as tf
from ctl import train
tf.profiler.experimental.start(sys.argv[1])
assert train.main(sys.argv[2:]) == 0
tf.profiler.experimental.stop()
"""


def python(*words: str) -> str:
    """What a program prints that sees the GPUs; it must end well."""
    env, gpus = dict(os.environ), os.environ['CTL_TEST_GPUS']
    env.pop('CUDA_VISIBLE_DEVICES')
    if gpus != 'all':
        env['CUDA_VISIBLE_DEVICES'] = gpus
    done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train(workdir: pathlib.Path, *words: str) -> Workdir:
    """The workdir of a run."""
    python('-m', 'ctl.train', *words, f'--workdir={workdir}')
    return Workdir(workdir)


@pytest.fixture(scope='module')
def gpus() -> int:
    """How many there are."""
    count = int(python('-c', COUNT).split()[-1])
    if not count:
        pytest.skip('TensorFlow finds no GPU here')
    return count


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp('gpu')


@pytest.fixture(scope='module')
def flags(gpus, folder):
    return [*write_data(folder), *overrides(train__steps=20, devices__kind='gpu', devices__replicas=1)]


@pytest.fixture(scope='module')
def on_one(flags, folder):
    return train(folder / 'one', *flags)


def two(gpus: int) -> list[str]:
    if gpus < 2:
        pytest.skip('there is one GPU')
    return overrides(devices__replicas=2)


def test_the_update_is_that_of_the_cpu(on_one, flags, folder):
    on_cpu = train(folder / 'cpu', *flags, *overrides(devices__kind='cpu'))
    difference = relative_difference(on_cpu.weights, on_one.weights)
    print(f'weights after 20 steps on a GPU and on the CPU: {difference:.1e}')
    assert difference <= 1e-4


@pytest.mark.parametrize('all_reduce', ['auto', 'nccl', 'ring', 'hierarchical'])
def test_two_gpus_make_the_update_of_one_however_they_sum(on_one, gpus, flags, tmp_path, all_reduce):
    on_two = train(tmp_path / 'two', *flags, *two(gpus), f'--config.devices.all_reduce={all_reduce}')
    difference = relative_difference(on_one.weights, on_two.weights)
    print(f'weights after 20 steps on one GPU and on two, {all_reduce}: {difference:.1e}')
    assert difference <= 1e-5


def test_microbatches_make_the_update_of_the_whole_batch(on_one, flags, tmp_path):
    sliced = train(tmp_path / 'sliced', *flags, '--config.train.microbatches=2')
    assert relative_difference(on_one.weights, sliced.weights) <= 1e-5


@pytest.mark.parametrize('experiment', ['bert_mlm', 'gan_digits'])
def test_check_replicas_finds_the_update_the_same(gpus, experiment):
    replicas = ','.join(map(str, range(1, min(gpus, 2) + 1)))
    words = [f'--experiment={experiment}', f'--replicas={replicas}', '--microbatches=1,2', '--config.devices.kind=gpu']
    assert 'The update is the same on all' in python('-m', 'tools.check_replicas', *words)


def test_a_deterministic_run_that_is_stopped_and_goes_on_is_one_that_never_was(flags, folder):
    words = [*flags, *overrides(train__deterministic='true', model__dropout=0.1, checkpoint__every=10)]
    words += overrides(optimizer__schedule='constant')  # which does not follow train.steps
    whole = train(folder / 'whole', *words)
    train(folder / 'parts', *words, '--config.train.steps=10')
    parts = train(folder / 'parts', *words)
    assert all(np.array_equal(value, parts.weights[name]) for name, value in whole.weights.items())


def test_a_skipped_step_is_put_back_on_the_gpu(on_one, flags, tmp_path):
    skipping = train(tmp_path / 'skip', *flags, '--config.train.on_nonfinite=skip')
    assert relative_difference(on_one.weights, skipping.weights) <= 1e-5


@pytest.mark.parametrize('precision, most', [('tensorfloat32', 0.05), ('bfloat16', 0.2)])
def test_fewer_bits_are_near_and_are_asked_for_by_name(on_one, flags, tmp_path, precision, most):
    short = train(tmp_path / precision, *flags, f'--config.train.precision={precision}')
    difference = relative_difference(on_one.weights, short.weights)
    print(f'weights after 20 steps in float32 and in {precision}: {difference:.1e}')
    assert difference <= most


def test_a_run_takes_the_gpus_it_has_replicas_for_and_memory_as_it_needs_it(flags, tmp_path):
    said = python('-c', TAKEN, *flags, f'--workdir={tmp_path / "run"}', '--config.train.steps=1')
    assert said.endswith('visible 1 grow 1\n')


def test_a_trace_tells_where_the_time_of_a_run_goes(flags, tmp_path):
    python('-c', TRACED, str(tmp_path / 'trace'), *flags, f'--workdir={tmp_path / "run"}')
    assert list((tmp_path / 'trace').rglob('*.xplane.pb'))
