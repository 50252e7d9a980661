"""Layers that Keras does not have in the form a replicated, resumable step needs."""

import keras
import tensorflow as tf

from ctl.errors import UserError
from ctl.seeds import Seed

SMALLEST_RATE = 1 / 512  # what is smaller would be rounded to 0


class Dropout(keras.Layer):
    """Dropout that is a function of the seed it is called with, and of nothing else.

    Keras's own draws the same mask on every replica and keeps its state in a variable that moves with every call. Here
    the caller folds step, replica and layer into the seed, so masks differ wherever they should, and a resumed run
    repeats them. (Srivastava et al. 2014, "Dropout", section 10's inverted form.)

    Each element takes only eight random bits, for speed: the rate acts as the multiple of 1/256 nearest to it, but
    never as 0 or 1, and the scale is the one of that multiple. 0.1 acts as 26/256 = 0.1016.
    """

    def __init__(self, rate: float, **kwargs):
        """`rate`, the part that is set to 0, is 0 or in [1/512, 1).

        Raises:
          UserError: for another rate.
        """
        super().__init__(**kwargs)
        if rate and not SMALLEST_RATE <= rate < 1:
            raise UserError(
                f'dropout={rate:g}: it acts in steps of 1/256. Use {SMALLEST_RATE} or more (below 1), or 0 for none.'
            )
        self.dropped_in_256 = min(max(round(rate * 256), 1), 255) if rate else 0

    def call(self, x, seed: Seed | None = None):
        """`x` float [...]; `seed` None lets everything through."""
        if seed is None or not self.dropped_in_256:
            return x
        shape = tf.shape(x)
        words = tf.random.stateless_uniform([(tf.size(x) + 3) // 4], seed, minval=None, maxval=None, dtype=tf.uint32)
        octets = tf.reshape(tf.reshape(tf.bitcast(words, tf.uint8), [-1])[: tf.size(x)], shape)
        keep = tf.cast(octets >= tf.cast(self.dropped_in_256, tf.uint8), x.dtype)
        return x * keep * tf.cast(256 / (256 - self.dropped_in_256), x.dtype)

    def compute_output_spec(self, x, seed=None):
        return keras.KerasTensor(x.shape, x.dtype)
