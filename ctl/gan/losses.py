"""The losses of a GAN on its discriminator's logits, and the penalties on its gradient: one number an example.

In all formulas D is the logit, sigma the logistic function, x a real example and G(z) a made one. Every function
returns the quantity of each example, float32 [B]; `ctl.losses.weighted_sum` makes the pair that the loop divides.

log(1 - sigma(D)) is written as -softplus(D) and log sigma(D) as -softplus(-D), which stay finite for any logit.
"""

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

Logits = tf.Tensor  # float32 [B]
Images = tf.Tensor  # float32 [B, ...]


def minimax_discriminator(real: Logits, made: Logits) -> tf.Tensor:
    """-log sigma(D(x)) - log(1 - sigma(D(G(z)))): Goodfellow et al. 2014, "Generative adversarial nets", equation 1."""
    return tf.nn.softplus(-real) + tf.nn.softplus(made)


def minimax_generator(made: Logits) -> tf.Tensor:
    """log(1 - sigma(D(G(z)))), the same game's other side, whose gradient is small while the discriminator wins."""
    return -tf.nn.softplus(made)


def nonsaturating_generator(made: Logits) -> tf.Tensor:
    """-log sigma(D(G(z))): Goodfellow et al. 2014, section 3; the discriminator's loss is that of minimax."""
    return tf.nn.softplus(-made)


def hinge_discriminator(real: Logits, made: Logits) -> tf.Tensor:
    """max(0, 1 - D(x)) + max(0, 1 + D(G(z))): Lim and Ye 2017, "Geometric GAN"; Miyato et al. 2018, equation 16."""
    return tf.nn.relu(1 - real) + tf.nn.relu(1 + made)


def least_squares_discriminator(real: Logits, made: Logits) -> tf.Tensor:
    """(D(x) - 1)^2 / 2 + D(G(z))^2 / 2: Mao et al. 2017, "Least squares GANs", equation 9."""
    return (tf.square(real - 1) + tf.square(made)) / 2


def least_squares_generator(made: Logits) -> tf.Tensor:
    """(D(G(z)) - 1)^2 / 2, likewise."""
    return tf.square(made - 1) / 2


def wasserstein_discriminator(real: Logits, made: Logits) -> tf.Tensor:
    """D(G(z)) - D(x): Arjovsky et al. 2017, "Wasserstein GAN", algorithm 1; needs a bound on D's slope: a penalty."""
    return made - real


def wasserstein_generator(made: Logits) -> tf.Tensor:
    """-D(G(z)), likewise; the generator's loss with hinge as well."""
    return -made


class Game(NamedTuple):
    """The losses of both players, and the logit above which the discriminator calls an example real; None for none."""

    discriminator: Callable[[Logits, Logits], tf.Tensor]
    generator: Callable[[Logits], tf.Tensor]
    boundary: float | None


GAMES = {
    'nonsaturating': Game(minimax_discriminator, nonsaturating_generator, 0.0),
    'minimax': Game(minimax_discriminator, minimax_generator, 0.0),
    'hinge': Game(hinge_discriminator, wasserstein_generator, 0.0),
    'least_squares': Game(least_squares_discriminator, least_squares_generator, 0.5),
    'wasserstein': Game(wasserstein_discriminator, wasserstein_generator, None),
}


def wgan_gp(discriminate: Callable[[Images], Logits], real: Images, made: Images, mix: tf.Tensor) -> tf.Tensor:
    """(|grad D(y)| - 1)^2 at y = mix x + (1 - mix) G(z), whose weight in the paper is 10.

    Gulrajani et al. 2017, "Improved training of Wasserstein GANs", equation 3.

    Args:
      discriminate: images -> logits, each image by itself: a batch norm inside would mix them.
      mix: in [0, 1), float32 [B], one number an example.
    """
    mix = tf.reshape(mix, [-1] + [1] * (real.shape.rank - 1))
    # The small number keeps the slope of the root finite where the gradient is 0.
    norm = tf.sqrt(_squared_slope(discriminate, mix * real + (1 - mix) * made) + 1e-12)
    return tf.square(norm - 1)


def r1(discriminate: Callable[[Images], Logits], real: Images) -> tf.Tensor:
    """|grad D(x)|^2 / 2 at real examples, whose weight in the paper is 10.

    Mescheder et al. 2018, "Which training methods for GANs do actually converge?", equation 9.
    """
    return _squared_slope(discriminate, real) / 2


def _squared_slope(discriminate: Callable[[Images], Logits], images: Images) -> tf.Tensor:
    """|grad D|^2 with respect to each image, [B]. An example's logit depends on its own image alone."""
    with tf.GradientTape() as tape:
        tape.watch(images)
        logits = discriminate(images)
    slope = tape.gradient(logits, images)
    return tf.reduce_sum(tf.square(slope), axis=list(range(1, images.shape.rank)))
