"""Losses and penalties against numbers worked out by hand."""

import numpy as np
import pytest
import tensorflow as tf

from ctl.gan.losses import GAMES, r1, wgan_gp

REAL, MADE = tf.constant([1.0, -2.0]), tf.constant([0.5, 3.0])

# log(1 + exp(x)) at -1, 2, 0.5, 3, -0.5 and -3.
SOFTPLUS = {-1: 0.313262, 2: 2.126928, 0.5: 0.974077, 3: 3.048587, -0.5: 0.474077, -3: 0.048587}
LOG = [SOFTPLUS[-1] + SOFTPLUS[0.5], SOFTPLUS[2] + SOFTPLUS[3]]


@pytest.mark.parametrize(
    'name, discriminator, generator',
    [
        ('minimax', LOG, [-SOFTPLUS[0.5], -SOFTPLUS[3]]),
        ('nonsaturating', LOG, [SOFTPLUS[-0.5], SOFTPLUS[-3]]),
        ('hinge', [0 + 1.5, 3 + 4], [-0.5, -3]),
        ('least_squares', [0.25 / 2, (9 + 9) / 2], [0.25 / 2, 4 / 2]),
        ('wasserstein', [0.5 - 1, 3 + 2], [-0.5, -3]),
    ],
)
def test_both_players_losses_are_those_of_the_paper(name, discriminator, generator):
    np.testing.assert_allclose(GAMES[name].discriminator(REAL, MADE), discriminator, rtol=1e-5)
    np.testing.assert_allclose(GAMES[name].generator(MADE), generator, rtol=1e-5)


@pytest.mark.parametrize('name', GAMES)
def test_no_loss_overflows_at_logits_that_are_far_out(name):
    far = tf.constant([1e4, -1e4])
    assert np.isfinite(GAMES[name].discriminator(far, -far)).all() and np.isfinite(GAMES[name].generator(far)).all()


def squares(images):
    """Slope 2 x, which is 10 long at (3, 4)."""
    return tf.reduce_sum(images**2, -1)


def test_r1_is_half_the_squared_slope_at_real_images():
    np.testing.assert_allclose(r1(squares, tf.constant([[3.0, 4.0], [0.0, 1.0]])), [50, 2])


def test_wgan_gp_is_the_squared_distance_of_the_slope_from_1_between_the_images():
    real, made = tf.constant([[3.0, 4.0]] * 3), tf.zeros([3, 2])
    # Slopes of 10, 5 and 0.
    np.testing.assert_allclose(wgan_gp(squares, real, made, tf.constant([1.0, 0.5, 0.0])), [81, 16, 1], rtol=1e-5)


@pytest.mark.parametrize(
    'penalty, slope',
    [
        (lambda d: r1(d, tf.constant([[3.0, 4.0]])), 4 * 25),  # 2 w^2 |x|^2
        (lambda d: wgan_gp(d, tf.constant([[3.0, 4.0]]), tf.zeros([1, 2]), tf.ones([1])), 2 * 9 * 10),  # (10 w - 1)^2
    ],
)
def test_a_penalty_has_the_gradient_of_a_gradient(penalty, slope):
    w = tf.Variable(1.0)
    with tf.GradientTape() as tape:
        value = tf.reduce_sum(penalty(lambda images: w * squares(images)))
    np.testing.assert_allclose(tape.gradient(value, w), slope, rtol=1e-5)


def test_a_slope_of_0_has_a_finite_gradient():
    images = tf.Variable(tf.zeros([1, 2]))
    with tf.GradientTape() as tape:
        value = tf.reduce_sum(wgan_gp(squares, images, images, tf.ones([1])))
    assert np.isfinite(tape.gradient(value, images)).all()
