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
    monkeypatch.setattr(tf.config, 'list_physical_devices', lambda kind: ['GPU'] * 2 if kind == 'GPU' else ['CPU'])


def test_more_replicas_than_gpus_are_refused(two_gpus):  # C34
    with pytest.raises(UserError, match='devices.replicas=4: this machine has 2 GPUs'):
        devices.make_strategy(base_config(devices=dict(replicas=4)).devices)


def test_one_device_is_refused_where_every_gpu_is_taken(two_gpus):
    with pytest.raises(UserError, match='devices.strategy=one has 1 replica, not devices.replicas=2'):
        devices.make_strategy(base_config(devices=dict(strategy='one')).devices)


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
