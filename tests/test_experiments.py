"""Every file in experiments/ trains two steps on made-up records, without being listed anywhere."""

import numpy as np
import pytest
import tensorflow as tf

from ctl import config as config_lib
from ctl.experiment import Feature, list_experiments, load_experiment
from tests.runs import Workdir, door, overrides
from tools.record_files import make_example

SMALL = {'layers': 1, 'width': 16, 'heads': 2, 'vocab_size': 50}
SMALL |= {'generator_width': 4, 'discriminator_width': 4, 'size': 16}


def make_up(feature: Feature, rng: np.random.Generator) -> np.ndarray | bytes:
    if feature.dtype == 'image':
        return tf.io.encode_png(rng.integers(0, 256, feature.shape, np.uint8)).numpy()
    if feature.dtype == 'float32':
        return rng.random(feature.shape, np.float32).reshape(-1)
    return rng.integers(0, feature.below or 5, feature.shape).reshape(-1)


@pytest.mark.slow  # in short: tests/test_run.py trains the one, and tests/test_gan.py the model of the others
@pytest.mark.xdist_group('digits')  # whose classifier is made once
@pytest.mark.parametrize('name', list_experiments())
def test_an_experiment_trains_two_steps_and_says_what_it_is(name, tmp_path):
    assert list_experiments()[name].endswith('.')
    module = load_experiment(name)
    config = module.get_config()
    small = {f'model.{key}': value for key, value in SMALL.items() if key in config.model}
    for key, value in small.items():
        config_lib.set_value(config, key, value)
    rng = np.random.default_rng(0)
    features = module.make_experiment(config).features
    for split in ('train', 'eval'):
        with tf.io.TFRecordWriter(str(tmp_path / f'{split}.tfrecord')) as writer:
            for _ in range(10):
                record = {key: make_up(feature, rng) for key, feature in features.items()}
                writer.write(make_example(record).SerializeToString())
    words = [f'--config.{key}={value}' for key, value in small.items()]
    words += overrides(data__train=tmp_path / 'train.tfrecord', data__eval=tmp_path / 'eval.tfrecord')
    words += overrides(train__steps=2, train__global_batch_size=4, log__every=1)
    assert door(f'--experiment={name}', *words, f'--workdir={tmp_path / "run"}') == 0
    assert [line['step'] for line in Workdir(tmp_path / 'run').lines('train')] == [1, 2]


def test_an_experiment_without_data_of_its_own_asks_for_some(tmp_path, capsys):
    path = tmp_path / 'mine.py'
    path.write_text(
        'from ctl.config import base_config\n\n\ndef get_config():\n    return base_config()\n\n\n'
        'def make_experiment(config):\n    pass\n'
    )
    assert door(f'--experiment={path}', f'--workdir={tmp_path / "run"}') == 2
    assert 'data.train is not set, and mine has no data of its own' in capsys.readouterr().err
