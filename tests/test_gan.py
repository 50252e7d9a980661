"""GANs: who is updated when, with what, and what of it is kept; on made-up images."""

import collections
import json

import numpy as np
import pytest
import tensorflow as tf

from tests import image_records
from tests.runs import Workdir, door, door_until, overrides, relative_difference, without_rates
from tools import explain_input

# Takes note of what each update is fed, and how often the losses are traced.
NOTING = '''
"""gan_images that takes note of what it is fed."""
import dataclasses
import tensorflow as tf
from experiments.gan_images import get_config, make_experiment as make

fed, traces = [], []

def make_experiment(config):
    experiment = make(config)
    def noting(objective):
        def losses_of(batch, seed):
            if seed is not None:
                traces.append(objective.name)
                note = lambda records, seed: fed.append((objective.name, tuple(records.tolist()), tuple(seed.tolist())))
                tf.numpy_function(note, [batch['record'], seed], [])
            return objective.losses(batch, seed)
        return dataclasses.replace(objective, losses=losses_of)
    return dataclasses.replace(experiment, objectives=[noting(o) for o in experiment.objectives])
'''


@pytest.fixture
def noting(tmp_path, monkeypatch):
    """Runs `gan_images` with flags in a workdir; what every update was fed, and the objectives traced."""
    from ctl import experiment, flags

    loaded = []

    def load(name):
        loaded.append(experiment.load_experiment(name))
        return loaded[-1]

    monkeypatch.setattr(flags, 'load_experiment', load)
    (tmp_path / 'noting.py').write_text(NOTING)

    def run(words, workdir):
        assert door(f'--experiment={tmp_path / "noting.py"}', *words[1:], f'--workdir={workdir}') == 0
        return loaded[-1].fed, loaded[-1].traces

    return run


def iterations(workdir, player):
    (count,) = Workdir(workdir).tensors(f'optimizers/{player}/iteration').values()
    return int(count)


@pytest.mark.parametrize(
    'generator, discriminator, order',
    [
        (3, 1, 'joint'),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(1, 1, 'joint'), (5, 1, 'sequential'), (1, 2, 'sequential'), (10, 1, 'joint')]
        ),
    ],
)
def test_each_player_is_updated_as_often_a_step_as_asked(tmp_path, generator, discriminator, order):
    flags = image_records.write_data(
        tmp_path, generator__updates=generator, discriminator__updates=discriminator, train__update_order=order
    )
    assert door(*flags, '--config.train.steps=3', f'--workdir={tmp_path / "run"}') == 0
    assert iterations(tmp_path / 'run', 'generator') == 3 * generator
    assert iterations(tmp_path / 'run', 'discriminator') == 3 * discriminator
    assert Workdir(tmp_path / 'run').lines('train')[-1]['examples'] == 3 * 8


@pytest.mark.parametrize('fresh', ['true', pytest.param('false', marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    'order, turns',
    [
        ('sequential', ['discriminator', 'discriminator', 'generator']),
        pytest.param('joint', ['discriminator', 'generator', 'discriminator'], marks=pytest.mark.slow),
    ],
)
def test_every_update_reads_the_batch_that_is_explained(tmp_path, noting, capsys, order, turns, fresh):  # C42
    """Its own, or the one that all updates of a step share."""
    settings = dict(train__steps=3, train__update_order=order, train__fresh_batches=fresh, discriminator__updates=2)
    words = image_records.write_data(tmp_path, **settings)
    fed, _ = noting(words, tmp_path / 'run')
    capsys.readouterr()
    assert explain_input.main([*words, '--json', '--steps=0:3', '--verify']) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    files = sorted(path.name for path in tmp_path.glob('train*'))
    numbers = {(file, i): n * 20 + i for n, file in enumerate(files) for i in range(20)}
    said = [tuple(numbers[tuple(record)] for record in line['records']) for line in lines]
    if fresh == 'true':
        assert [(line['step'], line['objective']) for line in lines] == [(i, name) for i in range(3) for name in turns]
    else:
        said = [records for records in said for _ in turns]
    assert [(name, records) for name, records, _ in fed] == list(zip(3 * turns, said, strict=True))
    assert len(set(said)) == (9 if fresh == 'true' else 3)


@pytest.mark.slow
def test_every_step_update_and_replica_has_its_own_noise_and_a_rerun_repeats_it(tmp_path, noting):
    words = image_records.write_data(tmp_path, train__steps=3, discriminator__updates=2, devices__replicas=2)
    first, traces = noting(words, tmp_path / 'one')
    again, _ = noting(words, tmp_path / 'two')
    assert len({seed for _, _, seed in first}) == len(first) == 3 * 3 * 2
    assert sorted(first) == sorted(again)
    # C40: traced once, a replica and update; both optimizers' slots were there before.
    assert len(traces) == 3 * 2
    one, two = Workdir(tmp_path / 'one').tensors(), Workdir(tmp_path / 'two').tensors()
    assert all(np.array_equal(one[name], two[name]) for name in one)


@pytest.fixture(scope='module')
def averaged(tmp_path_factory):
    """4 steps, all of them kept, with an average of the generator and more that has a state; the flags, and the run."""
    folder = tmp_path_factory.mktemp('averaged')
    words = image_records.write_data(
        folder,
        train__steps=4,
        discriminator__updates=2,
        train__fresh_batches='true',
        model__generator_norm='batch',
        model__spectral_norm='true',
        model__average=0.3,
        eval__every=2,
        checkpoint__keep=9,
    )
    assert door(*words, '--config.checkpoint.every=1', f'--workdir={folder / "run"}') == 0
    return words, Workdir(folder / 'run')


@pytest.mark.slow
@pytest.mark.xdist_group('averaged')
def test_stopped_between_steps_of_several_batches_a_run_is_the_run_never_stopped(averaged, tmp_path):
    words, whole = averaged
    door_until(1, *words, f'--workdir={tmp_path}')
    assert door(*words, '--config.checkpoint.every=1', f'--workdir={tmp_path}') == 0
    parts = Workdir(tmp_path)
    assert without_rates(whole.metrics) == without_rates(parts.metrics)
    found = parts.tensors()
    assert all(np.array_equal(value, found[name]) for name, value in whole.tensors().items())


@pytest.fixture
def players(tmp_path):
    """Two replicas of an experiment with a batch norm and a spectral norm, and what makes a round of updates of it."""
    from ctl import update
    from ctl.experiment import load_experiment
    from ctl.optimizers import make_optimizer

    module = load_experiment('gan_images')
    config = module.get_config()
    config.model.update(
        size=8, channels=1, generator_width=4, discriminator_width=4, generator_norm='batch', spectral_norm=True
    )
    strategy = tf.distribute.MirroredStrategy(['cpu:0', 'cpu:1'], cross_device_ops=tf.distribute.ReductionToOneDevice())
    with strategy.scope():
        experiment = module.make_experiment(config)
        optimizers = {o.name: make_optimizer(o.optimizer, 10, o.variables) for o in experiment.objectives}
    rng = np.random.default_rng(0)
    batch = {
        'image': tf.constant(rng.uniform(-1, 1, (4, 8, 8, 1)), tf.float32),
        'example_weight': tf.ones([4]),
        'example_seed': tf.zeros([4, 2], tf.int32),
    }

    def make_round(name, times=1):
        (objective,) = (o for o in experiment.objectives if o.name == name)

        def replica_step():
            update.make_round(
                experiment, [update.Turn(objective, optimizers[name], batch, tf.constant([1, 2]))], microbatches=1
            )

        once = tf.function(lambda: strategy.run(replica_step))
        for _ in range(times):
            once()

    return experiment, make_round


def values(model):
    """But for the vector of one number that the spectral norm of a single logit has, which is 1 or -1."""
    return {v.path: v.numpy() for v in model.variables if not v.path.endswith('logit_spectral/vector_u')}


@pytest.mark.parametrize('player, other', [('discriminator', 'generator'), ('generator', 'discriminator')])
def test_updating_one_player_leaves_every_weight_of_the_other_bit_equal(players, player, other):
    """Also a batch norm's averages and a spectral norm's vectors, though both players run in both updates."""
    experiment, make_round = players
    mine, others = values(experiment.models[player]), values(experiment.models[other])
    make_round(player)
    after = values(experiment.models[player])
    assert [path for path in mine if np.array_equal(mine[path], after[path])] == []
    assert all(np.array_equal(others[path], value) for path, value in values(experiment.models[other]).items())


def test_spectral_norm_divides_a_kernel_by_its_largest_singular_value_in_the_forward_pass(players):
    import keras

    experiment, make_round = players
    make_round('discriminator', times=30)
    discriminator = experiment.models['discriminator']
    layer = discriminator.convolutions[0]
    with keras.StatelessScope() as scope:
        discriminator(tf.zeros([1, 8, 8, 1]))
    stored = layer.layer.kernel.numpy().reshape(-1, 4)
    used = scope.get_current_value(layer.layer.kernel).numpy().reshape(-1, 4)
    assert np.linalg.norm(used, 2) == pytest.approx(1, rel=1e-2)
    np.testing.assert_allclose(used, stored / np.linalg.norm(stored, 2), rtol=2e-2)
    assert np.linalg.norm(stored, 2) != pytest.approx(1, rel=1e-2)


def test_an_update_outside_of_a_replica_is_refused_with_where_it_belongs(players):  # C39
    from ctl import update
    from ctl.errors import UserError

    experiment, _ = players
    strategy = tf.distribute.MirroredStrategy(['cpu:0', 'cpu:1'])
    with strategy.scope(), pytest.raises(UserError, match='inside strategy.run'):
        update.make_round(experiment, [], 1)


def generator_after_a_step(folder, name, **settings):
    settings = {'generator__name': 'sgd', 'discriminator__learning_rate': 0.1, **settings}
    flags = image_records.write_data(folder, train__steps=1, **settings)
    assert door(*flags, f'--workdir={folder / name}') == 0
    return Workdir(folder / name).tensors('models/generator')


@pytest.mark.slow
def test_joint_updates_start_from_the_same_weights(tmp_path):
    """A generator that is updated beside a discriminator moves as if that one had stood still."""
    joint = generator_after_a_step(tmp_path, 'joint', train__update_order='joint')
    still = generator_after_a_step(tmp_path, 'still', discriminator__learning_rate=0.0)
    assert all(np.array_equal(value, joint[name]) for name, value in still.items())


@pytest.mark.slow
def test_a_sequential_update_sees_the_one_before(tmp_path):
    sequential = generator_after_a_step(tmp_path, 'sequential')
    still = generator_after_a_step(tmp_path, 'still', discriminator__learning_rate=0.0)
    assert relative_difference(sequential, still) > 1e-6


@pytest.mark.xdist_group('averaged')
def test_the_average_follows_the_generator(averaged):
    _, run = averaged

    def weights(step, model):
        reader = tf.train.load_checkpoint(str(run.path / 'checkpoints' / f'ckpt-{step}'))
        names = [n for n in reader.get_variable_to_shape_map() if n.startswith(f'models/{model}/')]
        return {n.removeprefix(f'models/{model}/'): reader.get_tensor(n) for n in names}

    assert weights(1, 'average').keys() == weights(1, 'generator').keys() and len(weights(1, 'average')) > 8
    for step in (1, 2, 3):
        decay = min(0.3, (1 + step) / (10 + step))
        for name, before in weights(step, 'average').items():
            expected = decay * before + (1 - decay) * weights(step + 1, 'generator')[name]
            np.testing.assert_allclose(weights(step + 1, 'average')[name], expected, rtol=1e-5, atol=1e-7)


BFLOAT16 = {'train__precision': 'bfloat16', 'model__spectral_norm': 'true', 'model__classes': 3}
MICROBATCHES = {'train__microbatches': 2, 'model__spectral_norm': 'true', 'model__generator_norm': 'batch'}
SKIP = {'train__on_nonfinite': 'skip', 'devices__input_pipelines': 'per_replica', 'train__fresh_batches': 'true'}


@pytest.mark.slow
@pytest.mark.parametrize('settings', [BFLOAT16 | SKIP, BFLOAT16, MICROBATCHES, SKIP])
def test_a_gan_trains_with_what_the_loop_offers_every_experiment(tmp_path, settings):
    flags = image_records.write_data(tmp_path, train__steps=3, devices__replicas=2, **settings)
    assert door(*flags, f'--workdir={tmp_path / "run"}') == 0
    run = Workdir(tmp_path / 'run')
    assert [line['step'] for line in run.lines('train')] == [1, 2, 3]
    assert {value.dtype for value in run.weights.values()} == {np.dtype('float32')}
    assert all(np.isfinite(value).all() for value in run.weights.values())


@pytest.mark.slow
def test_a_batch_norm_never_sees_that_the_records_are_no_multiple_of_the_batch(tmp_path, noting):  # C04
    """With the weights held still its averages follow from the noise and the rows of each batch alone."""
    averages, reads = {}, {}
    for records in (80, 83):
        folder = tmp_path / str(records)
        folder.mkdir()
        words = image_records.write_data(
            folder,
            train=records,
            train__steps=25,  # 2 epochs and a part
            model__generator_norm='batch',
            generator__learning_rate=0.0,
            discriminator__learning_rate=0.0,
            devices__replicas=2,
        )
        fed, _ = noting(words, folder / 'run')
        reads[records] = collections.Counter(r for name, batch, _ in fed if name == 'generator' for r in batch)
        tensors = Workdir(folder / 'run').tensors('models/generator')
        averages[records] = {name: value for name, value in tensors.items() if 'moving' in name}
    assert len(averages[80]) > 2 and all(np.ptp(value) > 0 for value in averages[80].values())
    assert all(np.array_equal(value, averages[83][name]) for name, value in averages[80].items())
    # And no tail is dropped or filled up: every record is read again only when all others of its shard have been.
    assert sorted(reads[83]) == list(range(83)) and set(reads[83].values()) == {2, 3}


@pytest.mark.slow  # tests/test_gan_replicas.py has one with its replicas as well
def test_synchronised_batch_norm_has_the_statistics_of_the_joint_batch(tmp_path):  # C46
    found = {}
    for norm, replicas in (('sync_batch', 1), ('sync_batch', 2), ('batch', 2)):
        flags = image_records.write_data(
            tmp_path, train__steps=3, model__noise='record', model__generator_norm=norm, devices__replicas=replicas
        )
        assert door(*flags, f'--workdir={tmp_path / norm / str(replicas)}') == 0
        tensors = Workdir(tmp_path / norm / str(replicas)).tensors('models/generator')
        found[norm, replicas] = {name: value for name, value in tensors.items() if 'moving' in name}
    assert relative_difference(found['sync_batch', 1], found['sync_batch', 2]) < 1e-5
    assert relative_difference(found['sync_batch', 1], found['batch', 2]) > 1e-3  # which has those of each half


@pytest.mark.slow
def test_a_discriminator_that_is_always_right_is_said_once_in_words(tmp_path, capsys):
    flags = image_records.write_data(
        tmp_path,
        train__steps=80,
        train__watch_steps=20,
        log__every=5,
        model__penalty='none',
        model__discriminator_width=32,
        discriminator__learning_rate=0.01,
        generator__learning_rate=0.0,
    )
    assert door(*flags, f'--workdir={tmp_path / "run"}') == 0
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith('WARNING')]
    assert len(warnings) == 1
    assert 'discriminator_accuracy has been 1 since step ' in warnings[0]
    assert 'the generator learns next to nothing' in warnings[0]
    # A restart counts what went before, and does not say it again.
    more = ['--config.train.steps=85', f'--workdir={tmp_path / "run"}']
    assert door(*flags, *more) == 0
    assert 'WARNING' not in capsys.readouterr().out


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_player(tmp_path, capsys):
    flags = image_records.write_data(tmp_path, train__steps=20, model__loss='hinge', model__penalty='none')
    flags += overrides(generator__name='sgd', generator__learning_rate=1e38)
    assert door(*flags, f'--workdir={tmp_path / "run"}') == 3
    error = capsys.readouterr().err.strip()
    assert error.startswith('error: the loss or gradient of ') and 'or is not finite in step ' in error
    assert '\n' not in error


@pytest.mark.parametrize(
    'settings, said',
    [
        ({'model__loss': 'wasserstein', 'model__penalty': 'none'}, 'model.loss=wasserstein needs a bound on the disc'),
        ({'model__generator_norm': 'sync_batch', 'train__microbatches': 2}, 'model.generator_norm=sync_batch with'),
        ({'model__classes': 2}, 'which is not in [0, model.classes=2)'),
        ({'model__size': 16}, 'is an image of 8x8 pixels, expected 16x16: set --config.model.size=8'),
    ],
)
def test_settings_that_do_not_go_together_are_refused_in_one_line(tmp_path, capsys, settings, said):
    flags = image_records.write_data(tmp_path, **settings)
    assert door(*flags, f'--workdir={tmp_path / "run"}') == 2
    error = capsys.readouterr().err.strip()
    assert said in error and '\n' not in error


@pytest.mark.slow
def test_the_samples_are_of_the_same_latent_points_every_time_in_the_workdir_and_in_tensorboard(tmp_path):
    still = overrides(generator__learning_rate=0.0, discriminator__learning_rate=0.0, eval__every=2, model__classes=3)
    flags = [*image_records.write_data(tmp_path, train__steps=4, eval__at_start='true'), *still]
    assert door(*flags, f'--workdir={tmp_path / "run"}') == 0
    pictures = [tmp_path / 'run' / 'pictures' / f'samples-{step}.png' for step in (0, 2, 4)]
    first = pictures[0].read_bytes()
    assert [path.read_bytes() == first for path in pictures] == [True] * 3
    picture = tf.io.decode_png(first).numpy()
    assert picture.shape == (8 * (48 + 2), 3 * (48 + 2), 1)  # 8 rows, a column for each class
    (events,) = (tmp_path / 'run' / 'tensorboard' / 'pictures').iterdir()
    steps = [event.step for event in tf.compat.v1.train.summary_iterator(str(events)) if event.summary.value]
    assert steps == [0, 2, 4]
