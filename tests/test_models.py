"""Dropout that is a function of its seed, and the shapes and gradients of BERT."""

import re

import numpy as np
import pytest
import tensorflow as tf

from ctl.errors import UserError
from ctl.models.bert import BertPretrainer
from ctl.models.layers import Dropout
from ctl.seeds import fold
from tests.runs import door, write_data

SEED = tf.constant([3, 0])


def mask(rate, seed, shape=(64, 65)):
    return Dropout(rate)(tf.ones(shape), seed=seed).numpy()


@pytest.mark.parametrize('rate', [0.1, 0.5, 0.9])
def test_dropout_drops_its_part_and_keeps_the_mean(rate):
    dropped = mask(rate, SEED, (200, 501))
    assert np.mean(dropped == 0) == pytest.approx(rate, abs=0.005)
    assert dropped.mean() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize('rate, acting', [(0.0, 0), (1 / 512, 1), (0.1, 26), (0.5, 128), (0.999, 255)])
def test_a_dropout_rate_acts_as_the_nearest_256th_and_the_scale_matches_it(rate, acting):
    dropped = mask(rate, SEED, (1000, 1000))
    spread = np.sqrt(acting * (256 - acting)) / 256 / 1000  # of the mean of a million draws
    assert np.mean(dropped == 0) == pytest.approx(acting / 256, abs=5 * spread)
    assert set(np.unique(dropped)) <= {0, np.float32(256 / (256 - acting))}


@pytest.mark.parametrize('rate', [0.001, 1e-9, -0.1, 1.0])
def test_a_dropout_rate_that_would_silently_be_another_is_refused(rate):
    with pytest.raises(UserError, match=f'dropout={rate:g}: '):
        Dropout(rate)


def test_a_run_with_a_dropout_too_small_ends_with_a_line_whose_advice_works(tmp_path, capsys):
    words = [*write_data(tmp_path), f'--workdir={tmp_path / "run"}', '--dry_run']
    assert door(*words, '--config.model.dropout=0.001') == 2
    error = capsys.readouterr().err.strip()
    assert '\n' not in error
    smallest = re.search('Use ([0-9.]+) or more', error)[1]
    assert door(*words, f'--config.model.dropout={smallest}') == 0


def test_dropout_repeats_for_a_seed_and_differs_for_another():
    assert np.array_equal(mask(0.5, SEED), mask(0.5, SEED))
    for other in (fold(SEED, 0), fold(SEED, 1), fold(SEED, 1, 0), tf.constant([4, 0])):
        agreement = np.mean(mask(0.5, SEED) == mask(0.5, other))
        assert agreement == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize('shape', [(1,), (3,), (4,), (5, 7), (2, 3, 5, 7)])
def test_dropout_takes_any_shape(shape):
    assert mask(0.5, SEED, shape).shape == shape


def test_without_a_seed_nothing_is_dropped():
    assert np.all(mask(0.5, None) == 1)


def test_dropout_differs_over_replicas_and_repeats_over_runs():  # C53
    strategy = tf.distribute.MirroredStrategy(
        ['/cpu:0', '/cpu:1'], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )

    def step():
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return Dropout(0.5)(tf.ones([40, 50]), seed=fold(SEED, 7, replica))

    run = lambda: [x.numpy() for x in strategy.experimental_local_results(strategy.run(tf.function(step)))]  # noqa: E731
    (one, two), again = run(), run()
    assert np.mean(one == two) == pytest.approx(0.5, abs=0.05)
    assert np.array_equal([one, two], again)


def make_bert(next_sentence=True, dropout=0.1):
    model = BertPretrainer(
        vocab_size=30, max_length=8, layers=2, width=16, heads=2, dropout=dropout, next_sentence=next_sentence
    )
    ids = tf.constant([[2, 7, 8, 3, 9, 3, 0, 0], [2, 9, 9, 9, 3, 8, 8, 3]])
    inputs = (ids, tf.cast(ids > 0, tf.int32), tf.zeros([2, 8], tf.int32), tf.constant([[1, 2], [5, 6]]))
    model(*inputs)
    return model, inputs


def test_bert_gives_logits_for_the_gathered_positions_and_the_pair():
    model, inputs = make_bert()
    masked, pair = model(*inputs)
    assert masked.shape == (2, 2, 30) and masked.dtype == tf.float32
    assert pair.shape == (2, 2)


def test_padding_changes_nothing_and_the_masked_lm_head_sees_only_its_positions():
    model, (ids, mask, segments, positions) = make_bert()
    expected, _ = model(ids, mask, segments, positions)
    other = tf.tensor_scatter_nd_update(ids, [[0, 6], [0, 7]], [11, 12])
    found, _ = model(other, mask, segments, positions)
    assert found.numpy() == pytest.approx(expected.numpy(), abs=1e-6)


def test_the_output_matrix_of_the_masked_lm_head_is_the_word_embedding():
    model, inputs = make_bert()
    matrices = [v.path for v in model.trainable_variables if 30 in v.shape and len(v.shape) == 2]
    assert len(matrices) == 1
    before, _ = model(*inputs)
    model.encoder.words.embeddings.assign(model.encoder.words.embeddings.numpy()[::-1])
    after, _ = model(*inputs)
    assert not np.allclose(before, after)


@pytest.mark.parametrize('next_sentence', [True, False])
def test_every_weight_gets_a_gradient_with_and_without_the_next_sentence(next_sentence):  # C55
    model, inputs = make_bert(next_sentence)
    with tf.GradientTape() as tape:
        outputs = [x for x in model(*inputs, seed=SEED) if x is not None]
        value = sum(tf.reduce_sum(x**2) for x in outputs)
    gradients = tape.gradient(value, [v.value for v in model.trainable_variables])
    assert all(gradient is not None for gradient in gradients)
    assert any('pooler' in v.path for v in model.trainable_variables) == next_sentence


def test_two_dropouts_of_one_pass_draw_different_masks():
    model, inputs = make_bert(dropout=0.5)
    drawn = []
    original = Dropout.call

    def spy(self, x, seed=None):
        drawn.append(tuple(seed.numpy()))
        return original(self, x, seed)

    Dropout.call = spy
    try:
        model(*inputs, seed=SEED)
    finally:
        Dropout.call = original
    assert len(drawn) == 1 + 2 * 3 + 1 == len(set(drawn))
