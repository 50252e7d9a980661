"""Randomness as a function of numbers: a seed is made from those that tell one draw from another, and kept nowhere."""

import contextlib

import tensorflow as tf

Seed = tf.Tensor  # int32 [2]


def fold(seed: Seed | None, *numbers) -> Seed | None:
    """A new seed from a seed and whole numbers (step, replica, layer ...); None, for nothing random, stays None.

    It is a function of these alone. A fold by `number` gives [32 bits of a hash of the old seed, number]; by an int64
    number, 64 bits, and int64. So seeds that differ in the number folded last are never equal. Others, of different
    steps say, are equal by accident, one pair in 2^32: among 100,000 seeds, about one pair.
    """
    if seed is None:
        return None
    with _on_the_host():
        for number in numbers:
            seed = tf.random.experimental.stateless_fold_in(seed, number)
    return seed


def of_records(seed: Seed, records: tf.Tensor) -> tf.Tensor:
    """A seed for every record, int32 [B, 2], of a seed, int32 [2], and record numbers, int64 [B]: their sum, mod 2^32.

    Different records of one seed never have the same. A record of one seed and a record of another do by accident, one
    pair in 2^32, where the seeds' own difference makes up for that of the records.
    """
    with _on_the_host():
        return seed + tf.bitcast(records, tf.int32)


def _on_the_host() -> contextlib.AbstractContextManager:
    """Kernels take their seeds from the host's memory: one that a GPU has made must come back, and all wait for it."""
    return tf.device('/cpu:0') if tf.config.list_logical_devices('GPU') else contextlib.nullcontext()
