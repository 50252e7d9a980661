"""The check of an experiment passes sound ones, and finds and names what makes an update depend on the replicas."""

import pytest

from tests.runs import write_data
from tools import check_replicas

EXPERIMENT = '''
"""A line through the number of masked tokens, and what may be wrong with it."""
import keras
import tensorflow as tf
from ctl import losses
from ctl.config import Setting, add_settings, base_config
from ctl.experiment import Experiment, Feature, Objective

@tf.custom_gradient
def clipped(x):
    return x, lambda upstream: tf.clip_by_norm(upstream, 0.1)

def get_config():
    config = base_config(optimizer=dict(name='sgd', learning_rate=0.1, warmup_steps=0, clip_norm=0.0))
    add_settings(config, 'model', dropout=Setting(0.5, 'unused'))
    return config

def make_experiment(config):
    model = keras.Sequential([keras.Input([5]), keras.layers.Dense(3, 'tanh'), keras.layers.Dense(1)])
    def losses_of(batch, seed):
        x = tf.cast(batch['masked_lm_weights'], tf.float32)
        weight = batch['example_weight'] * tf.cast(1 + batch['next_sentence_labels'][:, 0], tf.float32)
        prediction = model(x)[:, 0]
        {fault}
        each = tf.square(prediction - tf.reduce_sum(x, 1))
        return {{'square': {returned}}}, {{}}
    return Experiment(
        {{'masked_lm_weights': Feature((5,), 'float32'), 'next_sentence_labels': Feature((1,))}}, {{'line': model}},
        [Objective('fit', model.trainable_variables, losses_of, config.optimizer)])
'''
SOUND = 'losses.weighted_sum(each, weight)'
MEAN = 'losses.WeightedSum(tf.reduce_sum(each * weight) / tf.reduce_sum(weight), tf.constant(1.0))'


@pytest.fixture
def flags(tmp_path):
    return [word for word in write_data(tmp_path) if '.data.' in word or 'batch_size' in word]


def run(flags, tmp_path, fault='pass', returned=SOUND, *words):
    path = tmp_path / 'line.py'
    path.write_text(EXPERIMENT.format(fault=fault, returned=returned))
    return check_replicas.main([f'--experiment={path}', *flags, *words])


@pytest.mark.slow
@pytest.mark.parametrize('numbers', [(1, 2), pytest.param((1, 2, 4), marks=pytest.mark.slow)])
def test_a_sound_experiment_passes_on_every_topology(flags, tmp_path, capsys, numbers):
    words = [] if numbers == (1, 2, 4) else ['--replicas=1,2', '--steps=2']  # the default, or fewer
    assert run(flags, tmp_path, 'pass', SOUND, *words) == 0
    out = capsys.readouterr().out
    for replicas in numbers:
        for microbatches in (1, 2):
            named = f'{replicas} replicas x {microbatches} microbatches against 1 replicas x 1'
            assert (named in out) == ((replicas, microbatches) != (1, 1))
    assert 'The update is the same on all' in out and 'cause' not in out


@pytest.mark.parametrize(
    'fault, returned, cause',
    [
        ('pass', MEAN, 'a mean taken inside the replica'),
        pytest.param(
            'prediction = clipped(prediction)', SOUND, 'a clip before the reduce', marks=pytest.mark.slow
        ),
        pytest.param(
            'prediction = prediction - tf.reduce_mean(prediction)', SOUND, 'batch statistics', marks=pytest.mark.slow
        ),
        pytest.param(
            'prediction = prediction + tf.random.normal(tf.shape(prediction))',
            SOUND,
            'random numbers that do not come',
            marks=pytest.mark.slow,
        ),
        pytest.param(  # finite itself, and its gradient nowhere
            'prediction = tf.where(prediction < 1e9, prediction, tf.math.log(prediction - prediction))',
            SOUND,
            'its gradient is not finite',
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_each_of_the_usual_faults_is_found_and_named(flags, tmp_path, capsys, fault, returned, cause):
    assert run(flags, tmp_path, fault, returned, '--replicas=1,2', '--steps=2') == 3
    captured = capsys.readouterr()
    assert 'cause: objective fit, square: ' in captured.out
    (named,) = [line for line in captured.out.splitlines() if line.startswith('cause: ')]
    assert cause in named
    assert 'the update depends on the replicas' in captured.err and captured.err.count('\n') == 1
    assert 'line' in captured.out or 'kernel' in captured.out  # the variables that differ


@pytest.mark.parametrize(
    'words, said',
    [
        (['--replicas=0'], '--replicas=0: expected whole numbers above 0'),
        (['--replicas=two'], '--replicas=two: expected'),
        (['--replicas=3'], 'global_batch_size=8 does not divide over 3 replicas'),
        (['--microbatches=3', '--replicas=1'], 'does not divide over 1 replicas x 3 microbatches'),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(flags, tmp_path, capsys, words, said):
    assert run(flags, tmp_path, 'pass', SOUND, *words) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and '\n' not in error
