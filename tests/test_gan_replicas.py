"""Invariant 2 for GANs: the same weights on 1, 2 and 4 replicas, for each loss and each penalty."""

import pytest

from tests import image_records
from tests.runs import Workdir, door, overrides, relative_difference

GAMES = [
    {'loss': 'nonsaturating', 'penalty': 'r1'},
    {'loss': 'minimax', 'penalty': 'none', 'spectral_norm': 'true', 'classes': 3},
    {'loss': 'hinge', 'penalty': 'r1', 'generator_norm': 'sync_batch', 'updates': 2, 'fresh_batches': 'true'},
    {'loss': 'least_squares', 'penalty': 'wgan_gp', 'update_order': 'joint'},
    {'loss': 'wasserstein', 'penalty': 'wgan_gp', 'updates': 2, 'update_order': 'joint', 'fresh_batches': 'true'},
]


def cases():
    for game in GAMES:
        for replicas in (2, 4):
            yield pytest.param(game, replicas, id=f'{game["loss"]}-{game["penalty"]}-{replicas}')


@pytest.mark.slow  # tests/test_three_objectives.py has the update of one on 2 replicas in short
@pytest.mark.parametrize('game, replicas', cases())
def test_replicas_make_the_update_of_one_when_noise_goes_with_the_record(tmp_path, game, replicas):  # C38
    train = {f'train__{key}': game[key] for key in ('fresh_batches', 'update_order') if key in game}
    model = {f'model__{k}': v for k, v in game.items() if k not in ('fresh_batches', 'update_order', 'updates')}
    flags = image_records.write_data(
        tmp_path,
        train__steps=10,
        model__noise='record',
        # Large steps, so that a difference would be one.
        generator__learning_rate=0.01,
        discriminator__learning_rate=0.01,
        discriminator__updates=game.get('updates', 1),
        **train,
        **model,
    )
    for count in (1, replicas):
        assert door(*flags, f'--config.devices.replicas={count}', f'--workdir={tmp_path / str(count)}') == 0
    expected, found = Workdir(tmp_path / '1'), Workdir(tmp_path / str(replicas))
    assert relative_difference(expected.weights, found.weights) <= 1e-5
    for a, b in zip(expected.lines('train'), found.lines('train'), strict=True):
        for name in ('discriminator_objective', 'generator_objective', 'loss'):
            assert b[name] == pytest.approx(a[name], rel=1e-5, abs=1e-6)
    for name in ('loss', 'frechet_distance', 'kernel_distance'):
        assert found.lines('eval')[-1][name] == pytest.approx(expected.lines('eval')[-1][name], rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_microbatches_make_the_same_update_too(tmp_path):
    flags = image_records.write_data(tmp_path, train__steps=10, model__noise='record', model__penalty='wgan_gp')
    flags += overrides(generator__learning_rate=0.01, discriminator__learning_rate=0.01)
    for microbatches in (1, 4):
        workdir = tmp_path / str(microbatches)
        assert door(*flags, f'--config.train.microbatches={microbatches}', f'--workdir={workdir}') == 0
    assert relative_difference(Workdir(tmp_path / '1').weights, Workdir(tmp_path / '4').weights) <= 1e-5


@pytest.mark.slow
def test_noise_of_a_replica_differs_from_noise_of_the_record(tmp_path):
    """Otherwise the tests above would prove nothing."""
    flags = image_records.write_data(tmp_path, train__steps=3, generator__learning_rate=0.01)
    for replicas in (1, 2):
        assert door(*flags, f'--config.devices.replicas={replicas}', f'--workdir={tmp_path / str(replicas)}') == 0
    assert relative_difference(Workdir(tmp_path / '1').weights, Workdir(tmp_path / '2').weights) > 1e-4
