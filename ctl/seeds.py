"""Randomness as a function of numbers: a seed is made from those that tell one draw from another, and kept nowhere."""

import contextlib

import tensorflow as tf

Seed = tf.Tensor  # int64 [2]


def make(first: int, second: int) -> Seed:
    """A seed from two whole numbers."""
    return tf.constant([first, second], tf.int64)


def fold(seed: Seed | None, *numbers) -> Seed | None:
    """A new seed from a seed and whole numbers (step, replica, layer ...); None, for nothing random, stays None.

    It is a function of these alone: a fold by `number` gives [64 bits of a hash of the old seed, number]. So seeds that
    differ in the number folded last are never equal; others, of different steps say, are by accident, one pair in 2^64.
    """
    if seed is None:
        return None
    with _on_the_host():
        for number in numbers:
            seed = tf.random.experimental.stateless_fold_in(seed, tf.cast(number, tf.int64))
    return seed


def of_records(seed: Seed, records: tf.Tensor) -> tf.Tensor:
    """A seed for every record, int64 [B, 2], of a seed and record numbers, int64 [B]: row i is fold(seed, records[i]).

    Where an update uses them on a GPU, the record numbers come back from it, once an update.
    """
    with _on_the_host():
        hashed = fold(seed, 0)[0]
        return tf.stack([tf.fill(tf.shape(records), hashed), records], axis=1)


def of_readings(seed: int, epochs: tf.Tensor, records: tf.Tensor) -> tf.Tensor:
    """A seed for every record in its epoch, int64 [B, 2], of a run's seed in [0, 2^31); no two are ever equal.

    Args:
      epochs: int64 [B], below 2^32.
      records: their numbers, int64 [B].
    """
    return tf.stack([(seed << 32) + epochs, records], axis=1)


def _on_the_host() -> contextlib.AbstractContextManager:
    """Kernels take their seeds from the host's memory: one that a GPU has made must come back, and all wait for it."""
    return tf.device('/cpu:0') if tf.config.list_logical_devices('GPU') else contextlib.nullcontext()
