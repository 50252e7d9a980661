"""Layers that Keras does not have in the form a replicated, resumable step needs."""

import keras
import tensorflow as tf

from ctl.seeds import Seed


class Dropout(keras.Layer):
    """Dropout that is a function of the seed it is called with, and of nothing else.

    Keras's own draws the same mask on every replica and keeps its state in a variable that moves with every call. Here
    the caller folds step, replica and layer into the seed, so masks differ wherever they should, and a resumed run
    repeats them. (Srivastava et al. 2014, "Dropout", section 10's inverted form.)

    Eight random bits an element are enough: the rate is rounded to the next 1/256, and the scale matches it.
    """

    def __init__(self, rate: float, **kwargs):
        """`rate` in [0, 1) is the part set to 0."""
        super().__init__(**kwargs)
        self.dropped_in_256 = min(255, round(rate * 256))

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
