"""Every file in experiments/ trains two steps on made-up records, without being listed anywhere."""

import numpy as np
import pytest
import tensorflow as tf

from ctl import config as config_lib
from ctl.experiment import Feature, list_experiments, load_experiment
from tests.runs import Workdir, door, overrides, write_shallow
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


CHANGED = """
import dataclasses

import tensorflow as tf

from ctl.losses import WeightedSum
from tests import shallow_bert
from tests.shallow_bert import get_config


def make_experiment(config):
    made = shallow_bert.make_experiment(config)
    first = made.objectives[0]

    def with_objective(**changed):
        return dataclasses.replace(made, objectives=[dataclasses.replace(first, **changed)])

    def with_metric(metric):
        return with_objective(losses=lambda *given: (first.losses(*given)[0], {"mine": metric(given[0])}))

    return """


@pytest.fixture(scope='module')
def shallow(tmp_path_factory):
    return write_shallow(tmp_path_factory.mktemp('data'))[1:]


@pytest.mark.parametrize(
    'returned, said',
    [
        ('None', 'mine.py: make_experiment() returned NoneType, not a ctl Experiment'),
        ('dataclasses.replace(made, prepare=lambda batch: {k: v[:3] for k, v in batch.items()})', 'each keeps its row'),
        ('dataclasses.replace(made, prepare=lambda batch: {**batch, "one": 1.0})', 'prepare: one has the shape []'),
        ('dataclasses.replace(made, prepare=lambda batch: None)', 'prepare: returned NoneType, not a dict'),
        ('dataclasses.replace(made, prepare=lambda batch, x: batch)', "missing a required argument: 'x'"),
        ('with_objective(variables=[])', 'has no variables, so that it would train nothing'),
        (
            'with_objective(losses=lambda batch, seed: first.losses(batch, seed)[0])',
            'not two dicts of name -> ctl.losses',
        ),
        ('with_metric(lambda batch: 1.0)', 'mine is float, not a ctl.losses.WeightedSum'),
        ('with_metric(lambda batch: WeightedSum(tf.ones([3]), 1.0))', 'the sum of mine has the shape [3]'),
    ],
)
def test_a_mistake_in_an_experiment_is_one_line_that_names_it(shallow, tmp_path, capsys, returned, said):
    (tmp_path / 'mine.py').write_text(CHANGED + returned)
    assert door(f'--experiment={tmp_path / "mine.py"}', *shallow, f'--workdir={tmp_path / "run"}', '--dry_run') == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith('error: ') and error.count('\n') == 1


def test_weights_may_be_whole_numbers_and_a_layer_may_have_float64(shallow, tmp_path):
    layer = 'with_metric(lambda batch: WeightedSum(3, tf.shape(batch["record"])[0]))'
    text = CHANGED.replace('shallow_bert.make_experiment(config)', 'wide(config)') + layer
    wide = (
        'def wide(config):\n'
        '    import keras\n'
        '    keras.config.set_dtype_policy("float64")\n'
        '    try:\n'
        '        return shallow_bert.make_experiment(config)\n'
        '    finally:\n'
        '        keras.config.set_dtype_policy("float32")\n\n\n'
    )
    (tmp_path / 'mine.py').write_text(text.replace('def make_experiment', wide + 'def make_experiment'))
    words = [*shallow, *overrides(train__steps=2, optimizer__clip_norm=1.0, devices__replicas=2)]
    assert door(f'--experiment={tmp_path / "mine.py"}', *words, f'--workdir={tmp_path / "run"}') == 0
    assert 0 < Workdir(tmp_path / 'run').lines('eval')[-1]['mine'] < 1


@pytest.mark.parametrize(
    'text, said',
    [
        ('x = 1\ndef broken(:\n    pass\n', 'mine.py:2: SyntaxError: invalid syntax'),
        ('raise SystemExit(0)\n', 'mine.py:1: SystemExit: 0'),
        ('def get_config(x):\n    pass\ndef make_experiment(config):\n    pass\n', 'get_config takes no arguments'),
    ],
)
def test_a_file_that_cannot_be_an_experiment_is_one_line(tmp_path, capsys, text, said):
    (tmp_path / 'mine.py').write_text(text)
    assert door(f'--experiment={tmp_path / "mine.py"}', f'--workdir={tmp_path / "run"}') == 2
    error = capsys.readouterr().err
    assert said in error and error.count('\n') == 1
