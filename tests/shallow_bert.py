"""bert_mlm with a model of four variables in BERT's place, which is traced in a fraction of the time.

For tests of the loop, which need its records, losses and settings, and not its encoder.
"""

import unittest.mock

import keras
import tensorflow as tf

from ctl.models.layers import Dropout
from ctl.seeds import fold
from experiments import bert_mlm
from experiments.bert_mlm import get_config  # noqa: F401


class Shallow(keras.Model):
    """Takes and gives what BertPretrainer does: each token is guessed from its own embedding and a matrix a layer."""

    def __init__(self, vocab_size, max_length, layers, width, heads, dropout, next_sentence, **kwargs):
        super().__init__(**kwargs)
        self.words = keras.layers.Embedding(vocab_size, width, name='words')
        self.transforms = [keras.layers.Dense(width, name=f'transform_{i}') for i in range(layers)]
        self.dropout = Dropout(dropout)
        self.next_sentence = keras.layers.Dense(2, use_bias=False, name='next_sentence') if next_sentence else None

    def call(self, input_ids, input_mask, segment_ids, masked_lm_positions, seed=None):
        x_BxLxD = self.dropout(self.words(input_ids), seed=fold(seed, 0))
        for transform in self.transforms:
            x_BxLxD = transform(x_BxLxD)
        masked_BxPxD = tf.gather(x_BxLxD, masked_lm_positions, batch_dims=1)
        words_VxD = tf.cast(self.words.embeddings, masked_BxPxD.dtype)
        logits_BxPxV = tf.cast(tf.einsum('bpd,vd->bpv', masked_BxPxD, words_VxD), tf.float32)
        if self.next_sentence is None:
            return logits_BxPxV, None
        return logits_BxPxV, tf.cast(self.next_sentence(x_BxLxD[:, 0]), tf.float32)


def make_experiment(config):
    with unittest.mock.patch.object(bert_mlm, 'BertPretrainer', Shallow):
        return bert_mlm.make_experiment(config)
