"""Sums and weights: what does not count is not there."""

import numpy as np
import tensorflow as tf

from ctl import losses


def test_what_has_weight_0_changes_no_sum_and_no_gradient_whatever_it_is():
    weights = tf.constant([1.0, 0.0, 2.0, 0.0])
    for nothing in (np.nan, np.inf, 5.0):
        each = tf.constant([3.0, nothing, 4.0, -nothing])
        with tf.GradientTape() as tape:
            tape.watch(each)
            total = losses.weighted_sum(each, weights)
        assert [float(part) for part in total] == [11.0, 3.0]
        assert tape.gradient(total.sum, each).numpy().tolist() == weights.numpy().tolist()


def test_a_number_that_counts_and_is_not_finite_is_not_hidden():
    assert np.isnan(losses.weighted_sum(tf.constant([1.0, np.nan]), tf.constant([1.0, 1.0])).sum)
    assert np.isnan(losses.weighted_sum(tf.constant([1.0, 2.0]), tf.constant([1.0, np.nan])).sum)
