"""A generator and a discriminator of convolutions: Radford et al. 2016, "Unsupervised representation learning with deep
convolutional generative adversarial networks", with the later changes that are named where they are made.

Shapes are in the names: B examples, Z latent numbers, S height and width of an image, C its channels, D features.
"""

import keras
import tensorflow as tf

NORMS = ('none', 'batch', 'sync_batch')


def _initializer() -> keras.initializers.Initializer:
    """He et al. 2015: without norms in between, the small weights of the paper would fade the signal out."""
    return keras.initializers.HeNormal()


def _leaky_relu(x: tf.Tensor) -> tf.Tensor:
    """With slope 0.2 below 0. TensorFlow's own op makes its graph optimizer complain where a gradient's gradient is."""
    return tf.maximum(x, 0.2 * x)


class Generator(keras.Model):
    """Latent points, and classes where there are any, to images in (-1, 1).

    Each of `blocks` blocks doubles height and width by repeating pixels, and convolves: Odena et al. 2016,
    "Deconvolution and checkerboard artifacts". With classes, an embedding of the class is appended to the latent point.
    """

    def __init__(
        self, size: int, channels: int, width: int, blocks: int, norm: str = 'none', classes: int = 0, **kwargs
    ):
        """`width` features at full size, twice as many at half of it; `norm` one of NORMS; 0 `classes` for none."""
        super().__init__(**kwargs)
        self.base, self.widths = size // 2**blocks, [width * 2 ** (blocks - i) for i in range(blocks + 1)]
        self.embedding = keras.layers.Embedding(classes, 32, name='class') if classes else None
        self.first = keras.layers.Dense(
            self.base**2 * self.widths[0], kernel_initializer=_initializer(), use_bias=norm == 'none', name='first'
        )
        self.norms = [_norm(norm, f'norm_{i}') for i in range(blocks + 1)]
        self.convolutions = [
            keras.layers.Conv2D(
                filters,
                3,
                padding='same',
                use_bias=norm == 'none',
                kernel_initializer=_initializer(),
                name=f'convolution_{i + 1}',
            )
            for i, filters in enumerate(self.widths[1:])
        ]
        self.last = keras.layers.Conv2D(
            channels, 3, padding='same', dtype='float32', kernel_initializer=_initializer(), name='image'
        )

    def call(self, z_BxZ, classes_B=None, training=False):
        if self.embedding:
            z_BxZ = tf.concat([z_BxZ, tf.cast(self.embedding(classes_B), z_BxZ.dtype)], -1)
        x_BxSxSxD = tf.reshape(self.first(z_BxZ), [-1, self.base, self.base, self.widths[0]])
        x_BxSxSxD = tf.nn.relu(self.norms[0](x_BxSxSxD, training=training))
        for convolution, norm in zip(self.convolutions, self.norms[1:], strict=True):
            x_BxSxSxD = tf.repeat(tf.repeat(x_BxSxSxD, 2, axis=1), 2, axis=2)
            x_BxSxSxD = tf.nn.relu(norm(convolution(x_BxSxSxD), training=training))
        return tf.tanh(self.last(x_BxSxSxD))


class Discriminator(keras.Model):
    """Images to logits, each image by itself: no batch norm, which penalties on the gradient do not allow.

    With classes, the class's embedding is projected on the features: Miyato and Koyama 2018, "cGANs with projection
    discriminator". `spectral` divides every kernel by its largest singular value: Miyato et al. 2018, "Spectral
    normalization for generative adversarial networks".
    """

    def __init__(
        self, size: int, channels: int, width: int, blocks: int, spectral: bool = False, classes: int = 0, **kwargs
    ):
        """`width` features at half of the size, twice as many at a quarter."""
        super().__init__(**kwargs)
        self.convolutions = [
            _limited(
                keras.layers.Conv2D(
                    width * 2**i, 4, 2, padding='same', kernel_initializer=_initializer(), name=f'convolution_{i}'
                ),
                spectral,
            )
            for i in range(blocks)
        ]
        self.features = width * 2 ** (blocks - 1) * (size // 2**blocks) ** 2
        self.head = _limited(keras.layers.Dense(1, dtype='float32', name='logit'), spectral)
        self.classes, self.projection = classes, None
        if classes:
            # An embedding, as a matrix product: Keras's spectral norm casts an embedding's output to its integer input.
            dense = keras.layers.Dense(self.features, use_bias=False, dtype='float32', name='class')
            self.projection = _limited(dense, spectral)
        self.spectral = {'training': True} if spectral else {}

    def call(self, images_BxSxSxC, classes_B=None):
        """-> float32 [B]."""
        x_BxSxSxD = images_BxSxSxC
        for convolution in self.convolutions:
            x_BxSxSxD = _leaky_relu(convolution(x_BxSxSxD, **self.spectral))
        features_BxD = tf.cast(tf.reshape(x_BxSxSxD, [-1, self.features]), tf.float32)
        logits_B = self.head(features_BxD, **self.spectral)[:, 0]
        if self.projection:
            class_BxD = self.projection(tf.one_hot(classes_B, self.classes), **self.spectral)
            logits_B += tf.reduce_sum(class_BxD * features_BxD, -1)
        return logits_B


def _norm(norm: str, name: str) -> keras.Layer:
    """Keras's batch norm, over this replica's slice or over those of all replicas; or nothing."""
    if norm == 'none':
        return keras.layers.Identity(name=name)
    return keras.layers.BatchNormalization(epsilon=1e-5, momentum=0.9, synchronized=norm == 'sync_batch', name=name)


def _limited(layer: keras.Layer, spectral: bool) -> keras.Layer:
    """Keras's spectral norm, always called as in training, also in evaluation.

    It overwrites the kernel by the divided one, and in evaluation takes it to be so. The loop keeps what it assigns out
    of the kernel (ctl/update.py), so that the division is part of the forward pass, as in the paper.
    """
    if not spectral:
        return layer
    # In the layer's own precision: it casts what goes in and comes out to that of the wrapper.
    return keras.layers.SpectralNormalization(layer, dtype=layer.dtype_policy, name=f'{layer.name}_spectral')
