"""One TensorFlow session of four virtual CPU devices for all tests of a process, and a cache folder of its own."""

import os
import pathlib

import hypothesis
import pytest

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

import tensorflow as tf  # noqa: E402

# At import, because a test module may make a tensor when it is collected.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices('CPU')[0], [tf.config.LogicalDeviceConfiguration()] * 4
)


# Two noisy cores: how long an example takes says nothing.
hypothesis.settings.register_profile(
    'ctl',
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.filter_too_much],
)
hypothesis.settings.load_profile('ctl')


# Groups that take minutes, each on one worker process: they begin first, so that none ends alone.
LONG_GROUPS = ('workers', 'stop', 'digits', 'elastic')


def pytest_collection_modifyitems(items):
    def rank(item):
        marks = [mark.args[0] for mark in item.iter_markers('xdist_group')]
        return min((LONG_GROUPS.index(name) for name in marks if name in LONG_GROUPS), default=len(LONG_GROUPS))

    items.sort(key=rank)


@pytest.fixture(scope='session', autouse=True)
def cache_of_its_own(tmp_path_factory):
    """Nothing is read from, or left in, the cache of whoever runs the tests."""
    before = os.environ.get('XDG_CACHE_HOME')
    os.environ['XDG_CACHE_HOME'] = str(tmp_path_factory.mktemp('cache'))
    yield pathlib.Path(os.environ['XDG_CACHE_HOME'])
    if before is None:
        del os.environ['XDG_CACHE_HOME']
    else:
        os.environ['XDG_CACHE_HOME'] = before
