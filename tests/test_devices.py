"""Which devices are refused, on a machine that says it has GPUs."""

import pytest
import tensorflow as tf

from ctl.config import base_config
from ctl.errors import UserError
from ctl.runtime import devices


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
