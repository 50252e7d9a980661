"""Which devices are refused, on a machine that says it has GPUs, and how they compute."""

import json
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from ctl.config import base_config
from ctl.errors import UserError
from ctl.runtime import devices
from tests.runs import Workdir, door, overrides, relative_difference, write_shallow


@pytest.fixture
def two_gpus(monkeypatch):
    """No machine that tests this has one: enough of two for what is decided before they are touched."""
    cpus = tf.config.list_physical_devices('CPU')
    monkeypatch.setattr(tf.config, 'list_physical_devices', lambda kind: ['GPU'] * 2 if kind == 'GPU' else cpus)


def test_more_replicas_than_gpus_are_refused(two_gpus):  # C34
    with pytest.raises(UserError, match='devices.replicas=4: this machine has 2 GPUs'):
        devices.make_strategy(base_config(devices=dict(replicas=4)).devices)


def test_one_device_is_refused_where_every_gpu_is_taken(two_gpus):
    with pytest.raises(UserError, match='devices.strategy=one has 1 replica, not devices.replicas=2'):
        devices.make_strategy(base_config(devices=dict(strategy='one')).devices)


@pytest.fixture
def gpus_taken(two_gpus, monkeypatch):
    """What is done to them, as names of TensorFlow's functions and their arguments."""
    taken = []
    monkeypatch.setattr(tf.config, 'get_visible_devices', lambda kind: ['GPU'] * 2)
    monkeypatch.setattr(tf.config, 'set_visible_devices', lambda devices, kind: taken.append(devices))
    monkeypatch.setattr(tf.config.experimental, 'get_memory_growth', lambda gpu: False)
    monkeypatch.setattr(tf.config.experimental, 'set_memory_growth', lambda gpu, grows: taken.append(f'{gpu} grows'))
    return taken


def test_gpus_without_a_replica_are_left_alone(gpus_taken):
    devices.make_strategy(base_config(devices=dict(replicas=1, strategy='one')).devices)
    assert gpus_taken == [['GPU'], 'GPU grows']


def test_replicas_may_be_on_the_cpu_where_there_are_gpus(gpus_taken):
    section = base_config(devices=dict(replicas=3, kind='cpu')).devices
    strategy = devices.make_strategy(section)
    assert gpus_taken == [[]] and strategy.num_replicas_in_sync == 3
    assert all('CPU' in device for device in strategy.extended.worker_devices)


def test_programs_that_only_read_have_as_many_replicas_on_the_cpu(gpus_taken):
    for replicas, all_reduce in ((0, 'nccl'), (2, 'auto')):
        section = devices.on_cpus(base_config(devices=dict(replicas=replicas, all_reduce=all_reduce)).devices)
        assert devices.make_strategy(section).num_replicas_in_sync == 2
    assert gpus_taken == [[], []]


def test_the_remedy_for_too_few_gpus_is_the_cpu(gpus_taken):
    section = base_config(devices=dict(replicas=4)).devices
    with pytest.raises(UserError, match='or devices.kind=cpu for 4 virtual devices'):
        devices.make_strategy(section)
    section.kind = 'cpu'
    assert devices.make_strategy(section).num_replicas_in_sync == 4


def test_gpus_that_are_not_there_are_refused():
    with pytest.raises(UserError, match='devices.kind=gpu: TensorFlow finds no GPU here'):
        devices.make_strategy(base_config(devices=dict(kind='gpu')).devices)


@pytest.mark.parametrize('kind', ['auto', 'cpu'])
def test_a_tensor_made_at_import_is_one_line_on_gpus_too(gpus_taken, monkeypatch, kind):
    def too_late(*args):
        raise RuntimeError('Visible devices cannot be modified after being initialized')

    monkeypatch.setattr(tf.config, 'set_visible_devices', too_late)
    with pytest.raises(UserError, match='Move what the experiment does at import into make_experiment'):
        devices.make_strategy(base_config(devices=dict(kind=kind)).devices)


def test_a_second_strategy_of_a_process_may_have_fewer_gpus(gpus_taken, monkeypatch):
    monkeypatch.setattr(tf.config.experimental, 'get_memory_growth', lambda gpu: True)
    devices.make_strategy(base_config(devices=dict(replicas=1, strategy='one')).devices)
    assert gpus_taken == []


@pytest.mark.parametrize('settings, used', [
    (dict(strategy='one', replicas=1), 1), (dict(replicas=3), 3), (dict(replicas=1), 1), (dict(), 8),
])  # fmt: skip
def test_of_eight_gpus_those_that_hold_no_replica_are_hidden_before_any_is_touched(monkeypatch, settings, used):
    """TensorFlow's own functions say what they were asked, in order; what makes a strategy touches the GPUs."""
    gpus, visible, touched = [f'GPU {i}' for i in range(8)], [f'GPU {i}' for i in range(8)], []

    def show(devices, kind):
        assert not touched and kind == 'GPU'
        visible[:] = devices

    def touch(names, **how):
        touched.append(
            [visible[int(name.rpartition(':')[2])] for name in ([names] if isinstance(names, str) else names)]
        )

    monkeypatch.setattr(tf.config, 'list_physical_devices', lambda kind: gpus if kind == 'GPU' else ['CPU'])
    monkeypatch.setattr(tf.config, 'get_visible_devices', lambda kind: visible)
    monkeypatch.setattr(tf.config, 'set_visible_devices', show)
    monkeypatch.setattr(tf.config.experimental, 'get_memory_growth', lambda gpu: False)
    monkeypatch.setattr(tf.config.experimental, 'set_memory_growth', lambda gpu, grows: None)
    monkeypatch.setattr(tf.distribute, 'OneDeviceStrategy', touch)
    monkeypatch.setattr(tf.distribute, 'MirroredStrategy', touch)
    devices.make_strategy(base_config(devices=settings).devices)
    assert touched == [gpus[:used]] and visible == gpus[:used]


@pytest.mark.parametrize('precision, short, compute', [
    ('float32', False, 'float32'), ('tensorfloat32', True, 'float32'), ('bfloat16', False, 'bfloat16'),
])  # fmt: skip
def test_float32_is_float32_and_tensorfloat32_is_asked_for_by_name(precision, short, compute):
    try:
        devices.set_precision(precision)
        assert tf.config.experimental.tensor_float_32_execution_enabled() == short
        policy = keras.config.dtype_policy()
        assert (policy.compute_dtype, policy.variable_dtype) == (compute, 'float32')
    finally:
        devices.set_precision('float32')


def test_determinism_is_asked_for_before_a_model_is_made(tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(tf.config.experimental, 'enable_op_determinism', lambda: asked.append(True))
    words = [*write_shallow(tmp_path), f'--workdir={tmp_path / "run"}', '--dry_run']
    assert door(*words) == 0 and asked == []
    assert door(*words, '--config.train.deterministic=true') == 0 and asked == [True]
    assert 'float32, deterministic' in capsys.readouterr().out


@pytest.mark.slow
def test_a_deterministic_run_is_the_same_to_the_bit_and_the_other_run_to_rounding(tmp_path):
    """In processes of their own, for it cannot be taken back."""
    words = [*write_shallow(tmp_path), *overrides(train__steps=8, devices__replicas=2, model__dropout=0.1)]
    assert door(*words, f'--workdir={tmp_path / "other"}') == 0
    for name in ('one', 'again'):
        more = ['--config.train.deterministic=true', f'--workdir={tmp_path / name}']
        done = subprocess.run([sys.executable, '-m', 'ctl.train', *words, *more], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    one, again, other = (Workdir(tmp_path / name) for name in ('one', 'again', 'other'))
    assert all(np.array_equal(value, again.weights[name]) for name, value in one.weights.items())
    assert relative_difference(one.weights, other.weights) <= 1e-5
    assert json.loads((tmp_path / 'one' / 'time.json').read_text())['seconds']['input wait'] >= 0
