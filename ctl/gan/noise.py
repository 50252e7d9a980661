"""What a GAN draws: the same numbers for the same seeds, and kept nowhere."""

import tensorflow as tf

from ctl import seeds

# Why the draws of one update differ: each has a number of its own.
LATENT, MIX = range(2)


def normal(batch: dict, seed: seeds.Seed | None, draw: int, width: int, by_record: bool) -> tf.Tensor:
    """Standard normal numbers, float32 [B, width].

    Args:
      batch: with `example_seed`, int64 [B, 2].
      seed: of the step, update and replica; None in evaluation, where each record always gets the same numbers.
      draw: which of the draws of an update.
      by_record: draw for each record by itself, so that it does not matter which replica it is on. Slower.
    """
    return _draw(tf.random.stateless_normal, batch, seed, draw, [width], by_record)


def uniform(batch: dict, seed: seeds.Seed | None, draw: int, by_record: bool) -> tf.Tensor:
    """Numbers in [0, 1), float32 [B]; arguments as for `normal`."""
    return _draw(tf.random.stateless_uniform, batch, seed, draw, [], by_record)


def _draw(function, batch: dict, seed: seeds.Seed | None, draw: int, shape: list[int], by_record: bool) -> tf.Tensor:
    each = batch['example_seed']
    if seed is None or by_record:
        return tf.map_fn(lambda seed: function(shape, seeds.fold(seed, draw)), each, fn_output_signature=tf.float32)
    return function([tf.shape(each)[0], *shape], seeds.fold(seed, draw))
