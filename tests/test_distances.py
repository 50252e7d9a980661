"""The distances between real and made images: against numbers worked out by hand, and exact over replicas."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf

from ctl.data import shards
from ctl.gan import distances
from tests import image_records
from tests.runs import Workdir, door, overrides


def test_the_frechet_distance_of_two_normal_distributions_is_that_of_the_paper():
    one = np.array([0.0]), np.array([[1.0]])
    other = np.array([2.0]), np.array([[4.0]])
    assert distances.frechet_distance(*one, *other) == pytest.approx(4 + (1 - 2) ** 2)
    rng = np.random.default_rng(0)
    a, b = np.cov(rng.normal(size=(5, 20))), np.cov(rng.normal(size=(5, 20)))
    mean = np.zeros(5)
    expected = np.trace(a + b) - 2 * np.sqrt(np.linalg.eigvals(a @ b).real).sum()
    assert distances.frechet_distance(mean, a, mean, b) == pytest.approx(expected)
    assert distances.frechet_distance(mean, a, mean, a) == pytest.approx(0, abs=1e-9)


def test_the_kernel_distance_is_that_of_all_pairs_of_different_records():
    x, y = np.array([[0.0], [1.0]]), np.array([[1.0], [2.0]])
    # (0 x 1 + 1)^3 = 1 among x, (1 x 2 + 1)^3 = 27 among y; (0 x 2 + 1)^3 = 1 and (1 x 1 + 1)^3 = 8 between them.
    assert distances.kernel_distance(x, y) == pytest.approx(1 + 27 - 2 * (1 + 8) / 2)


def test_the_kernel_distance_of_two_draws_of_the_same_classes_is_around_0():
    rng = np.random.default_rng(0)
    classes = 5 * rng.integers(0, 10, (300, 1))
    found = [distances.kernel_distance(*(classes + rng.normal(size=(300, 8)) for _ in range(2))) for _ in range(20)]
    assert abs(np.mean(found)) < 3 * np.std(found) / np.sqrt(len(found)) + 1e-9


@hypothesis.settings(max_examples=20)
@hypothesis.given(st.integers(2, 30), st.integers(1, 5), st.integers(0, 5), st.randoms())
def test_sums_over_any_slices_are_those_of_the_whole_and_padding_counts_nothing(examples, slices, padding, random):
    rng = np.random.default_rng(random.randrange(2**32))
    features = rng.normal(size=(examples, 3))
    order = rng.permutation(examples)
    total = None
    for part in np.array_split(order, slices):
        batch = {
            'evaluation_place': tf.constant(np.concatenate([part, np.zeros(padding, np.int64)])),
            'example_weight': tf.constant([1.0] * len(part) + [0.0] * padding),
        }
        padded = np.concatenate([features[part], rng.normal(size=(padding, 3))])
        sums = {name: value.numpy() for name, value in distances.feature_sums(tf.constant(padded), batch).items()}
        total = sums if total is None else {name: total[name] + sums[name] for name in sums}
    assert total['count'] == examples == total['in_row'].sum()
    mean, covariance = distances._moments(total)
    np.testing.assert_allclose(mean, features.mean(0), atol=1e-12)
    np.testing.assert_allclose(covariance, np.cov(features.T), atol=1e-12)
    np.testing.assert_array_equal(total['rows'][:examples], features)


@pytest.mark.slow
def test_the_kernel_distance_compares_a_sample_of_all_files(tmp_path, monkeypatch):
    """13 records of which 5 are compared: those with the first places in the order that the seed draws."""
    monkeypatch.setattr(distances, 'KERNEL_RECORDS', 5)
    seen = []

    def note(features, batch):
        rows = feature_sums(features, batch)
        tf.numpy_function(
            lambda *each: seen.append(each), [batch['record'], batch['example_weight'], rows['in_row']], []
        )
        return rows

    feature_sums = distances.feature_sums
    monkeypatch.setattr(distances, 'feature_sums', note)
    flags = image_records.write_data(tmp_path, train__steps=1, train__global_batch_size=1)
    assert door(*flags, f'--workdir={tmp_path / "run"}') == 0
    compared = {int(record[0]) for record, weight, in_row in seen if weight[0] and in_row.any()}
    assert compared == set(shards.permutation(13, 0)[:5].tolist()) != set(range(5))


@pytest.mark.slow
def test_an_evaluation_gives_the_same_distances_on_1_2_and_3_replicas(tmp_path):
    """13 records in batches of 6, the last mostly padding; no weight moves."""
    flags = image_records.write_data(tmp_path, train__steps=1, train__global_batch_size=6, eval__at_start='true')
    flags += overrides(generator__learning_rate=0.0, discriminator__learning_rate=0.0)
    found = []
    for replicas in (1, 2, 3):
        assert door(*flags, f'--config.devices.replicas={replicas}', f'--workdir={tmp_path / str(replicas)}') == 0
        found += Workdir(tmp_path / str(replicas)).lines('eval')
    for name in ('frechet_distance', 'kernel_distance', 'loss'):
        assert found[0][name] != 0
        assert [line[name] for line in found] == pytest.approx([found[0][name]] * 6, rel=1e-6), name


def test_the_distance_of_images_is_that_of_their_features_in_one_piece():
    from experiments.gan_images import shrink

    images = np.random.default_rng(0).uniform(-1, 1, (40, 16, 16, 1)).astype(np.float32)
    tally = distances.make_tally(shrink, lambda batch: batch['image'] ** 2)
    sums = None
    for part in np.array_split(np.arange(40), 3):
        batch = {
            'image': tf.constant(images[part]),
            'evaluation_place': tf.constant(part),
            'example_weight': tf.ones([len(part)]),
        }
        more = {name: value.numpy() for name, value in tally.sums(batch).items()}
        sums = more if sums is None else {name: sums[name] + more[name] for name in sums}
    real, made = (shrink(tf.constant(each)).numpy().astype(np.float64) for each in (images, images**2))
    expected = distances.frechet_distance(real.mean(0), np.cov(real.T), made.mean(0), np.cov(made.T))
    assert tally.values(sums)['frechet_distance'] == pytest.approx(expected, rel=1e-6)
    assert tally.values(sums)['kernel_distance'] == pytest.approx(distances.kernel_distance(real, made), rel=1e-6)
