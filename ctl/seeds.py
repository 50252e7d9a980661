"""Randomness as a function of numbers: a seed is made from those that tell one draw from another, and kept nowhere."""

import tensorflow as tf

Seed = tf.Tensor  # int32 [2]


def fold(seed: Seed | None, *numbers) -> Seed | None:
    """A new seed from a seed and whole numbers (step, replica, layer ...); None, for nothing random, stays None."""
    if seed is None:
        return None
    for number in numbers:
        seed = tf.random.experimental.stateless_fold_in(seed, number)
    return seed


def of_records(seed: Seed, records: tf.Tensor) -> tf.Tensor:
    """A seed for every record: int32 [2] and record numbers, int64 [B] -> int32 [B, 2].

    Under one seed no two records have the same. Under another seed, whose 32 folded bits are as good as random, a
    record may by chance have the one that some other record has under this.
    """
    return seed + tf.bitcast(records, tf.int32)
