"""A user's own experiment with three players, in one file: an encoder, a generator and a discriminator of pairs."""

import numpy as np
import pytest

from tests import image_records
from tests.runs import Workdir, door, overrides, relative_difference
from tools import check_replicas

# Dumoulin et al. 2017, "Adversarially learned inference": real images with their codes against made ones with theirs.
EXPERIMENT = '''
"""Three players."""
import keras
import tensorflow as tf
from ctl import losses
from ctl.config import add_settings, base_config, Setting
from ctl.experiment import Experiment, Feature, Objective
from ctl.gan import noise
from ctl.gan.losses import GAMES

PLAYERS = ('discriminator', 'encoder', 'generator')

def get_config():
    config = base_config(optimizers=PLAYERS)
    add_settings(config, 'model', noise=Setting('record', 'how it is drawn', choices=('replica', 'record')))
    return config

def make_experiment(config):
    def network(name, inputs, outputs):
        return keras.Sequential([
            keras.Input([inputs]), keras.layers.Dense(16, 'tanh', name='hidden'),
            keras.layers.Dense(outputs, name='out')], name=name)
    models = {'encoder': network('encoder', 64, 3), 'generator': network('generator', 3, 64),
              'discriminator': network('discriminator', 67, 1)}
    game = GAMES['nonsaturating']

    def logits(batch, seed):
        x = batch['x']
        z = noise.normal(batch, seed, noise.LATENT, 3, config.model.noise == 'record')
        real = models['discriminator'](tf.concat([x, models['encoder'](x)], -1))[:, 0]
        made = models['discriminator'](tf.concat([models['generator'](z), z], -1))[:, 0]
        return real, made

    def make_losses(name, each):
        return lambda batch, seed: (
            {name: losses.weighted_sum(each(*logits(batch, seed)), batch['example_weight'])}, {})

    sides = {
        'discriminator': game.discriminator,
        'encoder': lambda real, made: game.generator(-real),
        'generator': lambda real, made: game.generator(made),
    }
    return Experiment(
        features={'image': Feature((8, 8, 1), 'image')},
        prepare=lambda batch: {**batch, 'x': tf.reshape(tf.cast(batch['image'], tf.float32) / 255, [-1, 64])},
        models=models,
        objectives=[
            Objective(name, models[name].trainable_variables, make_losses(f'{name}_loss', sides[name]), config[name],
                      updates=2 if name == 'encoder' else 1)
            for name in PLAYERS
        ],
    )
'''


@pytest.fixture
def flags(tmp_path):
    (tmp_path / 'three.py').write_text(EXPERIMENT)
    data = [word for word in image_records.write_data(tmp_path) if '.data.' in word or '.log.' in word]
    return [f'--experiment={tmp_path / "three.py"}', *data, *overrides(train__global_batch_size=8)]


@pytest.mark.slow
def test_three_objectives_train_the_same_on_any_replicas_and_each_moves_its_own_player(flags, tmp_path):
    """The encoder has a learning rate of 0."""
    words = [*flags, *overrides(train__steps=6, train__fresh_batches='true', encoder__learning_rate=0.0)]
    for replicas in (1, 2):
        more = overrides(devices__replicas=replicas, checkpoint__every=2)
        assert door(*words, *more, f'--workdir={tmp_path / str(replicas)}') == 0
    one, two = Workdir(tmp_path / '1'), Workdir(tmp_path / '2')
    assert relative_difference(one.weights, two.weights) <= 1e-5
    line = one.lines('train')[-1]
    assert line['loss'] == pytest.approx(
        sum(line[f'{name}_objective'] for name in ('discriminator', 'encoder', 'generator'))
    )
    assert line['examples'] == 6 * 4 * 8  # steps, updates, batch
    (updates,) = one.tensors('optimizers/encoder/iteration').values()
    assert int(updates) == 12
    import tensorflow as tf

    first, last = (tf.train.load_checkpoint(str(one.path / 'checkpoints' / f'ckpt-{step}')) for step in (4, 6))
    moved = {
        name.split('/')[1]
        for name in first.get_variable_to_shape_map()
        if name.startswith('models/') and not np.array_equal(first.get_tensor(name), last.get_tensor(name))
    }
    assert moved == {'discriminator', 'generator'}


@pytest.mark.slow
def test_the_tool_that_compares_replicas_takes_several_objectives(flags, capsys):
    assert check_replicas.main([*flags, '--replicas=1,2', '--microbatches=1', '--steps=2']) == 0
    assert 'The update is the same on all' in capsys.readouterr().out


def test_a_variable_that_two_objectives_own_is_refused_by_name(flags, tmp_path, capsys):
    text = (tmp_path / 'three.py').read_text()
    (tmp_path / 'three.py').write_text(
        text.replace(
            'Objective(name, models[name].trainable_variables', "Objective(name, models['generator'].variables"
        )
    )
    assert door(*flags, f'--workdir={tmp_path / "run"}') == 2
    error = capsys.readouterr().err.strip()
    assert 'generator/hidden/kernel is owned by discriminator and by encoder' in error and '\n' not in error
