"""Losses and metrics as pairs (sum, weight). Nothing divides here: the one division is by the global weight.

A mean of means is wrong as soon as replicas hold different numbers of masked tokens, and a mean over the replica's own
slice makes gradients too large by the number of replicas. A sum over the slice has neither fault.
"""

from typing import NamedTuple

import tensorflow as tf


class WeightedSum(NamedTuple):
    """A quantity over some examples: their weighted sum and the sum of their weights, float32 scalars."""

    sum: tf.Tensor
    weight: tf.Tensor


def softmax_cross_entropy(logits: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor) -> WeightedSum:
    """-log softmax(logits)[label], in nats.

    Args:
      logits: float [..., classes].
      labels: int [...].
      weights: float32 [...]: 0 for what does not count.
    """
    each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=tf.cast(logits, tf.float32))
    return weighted_sum(each, weights)


def accuracy(logits: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor) -> WeightedSum:
    """1 where the largest logit is the label's; arguments as for `softmax_cross_entropy`."""
    right = tf.argmax(logits, -1, output_type=labels.dtype) == labels
    return weighted_sum(tf.cast(right, tf.float32), weights)


def weighted_sum(each: tf.Tensor, weights: tf.Tensor) -> WeightedSum:
    """`each` and `weights` float32 [...], of one shape. What has weight 0 does not count, even where it is NaN.

    Its gradient is 0 times the slope of `each`, and so NaN where that slope is infinite. That is why the rows that the
    loop gives `example_weight` 0 are copies of sound records.
    """
    counted = tf.where(weights == 0, tf.zeros_like(each), each)
    return WeightedSum(tf.reduce_sum(counted * weights), tf.reduce_sum(weights))
