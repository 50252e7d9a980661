"""BERT for pre-training: Devlin et al. 2019, "BERT: Pre-training of Deep Bidirectional Transformers".

Shapes are in the names: B examples, L positions, D width, N heads, H width of a head, P masked positions, V vocabulary.
"""

import keras
import tensorflow as tf

from ctl.models.layers import Dropout
from ctl.seeds import Seed, fold

# Added to the logits of padding: small enough for softmax to give 0, and finite, so that a row of padding is no NaN.
MASKED = -1e9


def _initializer() -> keras.initializers.Initializer:
    return keras.initializers.TruncatedNormal(stddev=0.02)


def _dense(width: int, name: str, **kwargs) -> keras.layers.Dense:
    return keras.layers.Dense(width, kernel_initializer=_initializer(), name=name, **kwargs)


def _norm(name: str) -> keras.layers.LayerNormalization:
    return keras.layers.LayerNormalization(epsilon=1e-12, name=name)


def _gelu(x: tf.Tensor) -> tf.Tensor:
    return keras.activations.gelu(x, approximate=True)


class Attention(keras.Layer):
    """Self-attention of N heads: Vaswani et al. 2017, "Attention is all you need", section 3.2."""

    def __init__(self, width: int, heads: int, dropout: float, **kwargs):
        super().__init__(**kwargs)
        self.heads, self.head_width = heads, width // heads
        self.query_key_value = _dense(3 * width, 'query_key_value')
        self.output_projection = _dense(width, 'output')
        self.dropout = Dropout(dropout)

    def call(self, x_BxLxD, bias_Bx1x1xL, seed: Seed | None = None):
        B, L, D = x_BxLxD.shape
        qkv_BxLx3xNxH = tf.reshape(self.query_key_value(x_BxLxD), [-1, L, 3, self.heads, self.head_width])
        # Unstacking is cheap to differentiate; indexing would pad a gradient of the whole tensor three times.
        q_BxNxLxH, k_BxNxLxH, v_BxNxLxH = tf.unstack(tf.transpose(qkv_BxLx3xNxH, [2, 0, 3, 1, 4]))
        logits_BxNxLxL = tf.matmul(q_BxNxLxH * self.head_width**-0.5, k_BxNxLxH, transpose_b=True)
        weights_BxNxLxL = tf.nn.softmax(logits_BxNxLxL + tf.cast(bias_Bx1x1xL, logits_BxNxLxL.dtype))
        mixed_BxNxLxH = tf.matmul(self.dropout(weights_BxNxLxL, seed=seed), v_BxNxLxH)
        return self.output_projection(tf.reshape(tf.transpose(mixed_BxNxLxH, [0, 2, 1, 3]), [-1, L, D]))


class Block(keras.Layer):
    """Attention and a feed-forward network four times as wide, each added to its input and then normalised."""

    def __init__(self, width: int, heads: int, dropout: float, **kwargs):
        super().__init__(**kwargs)
        self.attention = Attention(width, heads, dropout, name='attention')
        self.attention_norm = _norm('attention_norm')
        self.widen = _dense(4 * width, 'widen', activation=_gelu)
        self.narrow = _dense(width, 'narrow')
        self.output_norm = _norm('output_norm')
        self.dropout = Dropout(dropout)

    def call(self, x_BxLxD, bias_Bx1x1xL, seed: Seed | None = None):
        attended_BxLxD = self.attention(x_BxLxD, bias_Bx1x1xL, seed=fold(seed, 0))
        x_BxLxD = self.attention_norm(x_BxLxD + self.dropout(attended_BxLxD, seed=fold(seed, 1)))
        fed_BxLxD = self.narrow(self.widen(x_BxLxD))
        return self.output_norm(x_BxLxD + self.dropout(fed_BxLxD, seed=fold(seed, 2)))


class Encoder(keras.Layer):
    """Word, position and segment embeddings, then blocks."""

    def __init__(self, vocab_size: int, max_length: int, layers: int, width: int, heads: int, dropout: float, **kwargs):
        super().__init__(**kwargs)
        self.words = keras.layers.Embedding(vocab_size, width, embeddings_initializer=_initializer(), name='words')
        self.positions = keras.layers.Embedding(
            max_length, width, embeddings_initializer=_initializer(), name='positions'
        )
        self.segments = keras.layers.Embedding(2, width, embeddings_initializer=_initializer(), name='segments')
        self.norm = _norm('norm')
        self.dropout = Dropout(dropout)
        self.blocks = [Block(width, heads, dropout, name=f'block_{i}') for i in range(layers)]

    def call(self, input_ids_BxL, input_mask_BxL, segment_ids_BxL, seed: Seed | None = None):
        """int32 [B, L] three times -> float [B, L, D]."""
        L = input_ids_BxL.shape[1]
        x_BxLxD = self.words(input_ids_BxL) + self.positions(tf.range(L))[None] + self.segments(segment_ids_BxL)
        x_BxLxD = self.dropout(self.norm(x_BxLxD), seed=fold(seed, 0))
        bias_Bx1x1xL = MASKED * (1 - tf.cast(input_mask_BxL, tf.float32))[:, None, None, :]
        for number, block in enumerate(self.blocks, start=1):
            x_BxLxD = block(x_BxLxD, bias_Bx1x1xL, seed=fold(seed, number))
        return x_BxLxD


class BertPretrainer(keras.Model):
    """The encoder with the masked-LM head and, unless `next_sentence` is off, the next-sentence head.

    The masked-LM head sees the gathered positions only, and its output matrix is the word embedding's.
    """

    def __init__(
        self,
        vocab_size: int,
        max_length: int,
        layers: int,
        width: int,
        heads: int,
        dropout: float,
        next_sentence: bool,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.vocab_size = vocab_size
        self.encoder = Encoder(vocab_size, max_length, layers, width, heads, dropout, name='encoder')
        self.transform = _dense(width, 'masked_lm_transform', activation=_gelu)
        self.transform_norm = _norm('masked_lm_norm')
        self.pooler = _dense(width, 'pooler', activation='tanh') if next_sentence else None
        self.pooler_dropout = Dropout(dropout) if next_sentence else None
        self.next_sentence = _dense(2, 'next_sentence', dtype='float32') if next_sentence else None

    def build(self, *shapes):
        self.masked_lm_bias = self.add_weight(shape=[self.vocab_size], initializer='zeros', name='masked_lm_bias')

    def call(self, input_ids, input_mask, segment_ids, masked_lm_positions, seed: Seed | None = None):
        """Logits of the masked tokens and of the next sentence.

        Args:
          input_ids, input_mask, segment_ids: int32 [B, L].
          masked_lm_positions: int32 [B, P].
          seed: int64 [2] for dropout; None for none.

        Returns:
          float32 [B, P, V], and float32 [B, 2] or None.
        """
        x_BxLxD = self.encoder(input_ids, input_mask, segment_ids, seed=fold(seed, 0))
        masked_BxPxD = tf.gather(x_BxLxD, masked_lm_positions, batch_dims=1)
        masked_BxPxD = self.transform_norm(self.transform(masked_BxPxD))
        words_VxD = tf.cast(self.encoder.words.embeddings, masked_BxPxD.dtype)
        logits_BxPxV = tf.einsum('bpd,vd->bpv', masked_BxPxD, words_VxD)
        logits_BxPxV = tf.cast(logits_BxPxV, tf.float32) + tf.cast(self.masked_lm_bias, tf.float32)
        if self.next_sentence is None:
            return logits_BxPxV, None
        pooled_BxD = self.pooler_dropout(self.pooler(x_BxLxD[:, 0]), seed=fold(seed, 1))
        return logits_BxPxV, self.next_sentence(pooled_BxD)
