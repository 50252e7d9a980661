"""Schedules, decay, and the one private name of Keras that this stands on."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer

from ctl import optimizers
from ctl.config import base_config

NAMES = ['adamw', 'adam', 'lamb', 'sgd']


def section(**changed):
    config = base_config(optimizer=changed)
    return config.optimizer


def two_replicas():
    return tf.distribute.MirroredStrategy(['/cpu:0', '/cpu:1'], cross_device_ops=tf.distribute.ReductionToOneDevice())


def variable(shape, name='kernel'):
    return keras.Variable(np.ones(shape), name=name)


def test_keras_still_reduces_in_the_one_method_that_is_overridden():
    """If this fails, Keras has moved it: the optimizers in ctl/optimizers.py would sum gradients twice."""
    assert '_all_reduce_sum_gradients' in inspect.getsource(TFOptimizer._backend_update_step)
    assert 'all_reduce' in inspect.getsource(TFOptimizer._all_reduce_sum_gradients)


@pytest.mark.parametrize('name', NAMES)
def test_an_optimizer_under_two_replicas_does_not_sum_reduced_gradients_again(name):
    """Both replicas apply the gradient 1. Summed again it would be 2, and a step of SGD twice as long."""

    def weights_after(strategy):
        with strategy.scope():
            v = variable([2, 2])
            optimizer = optimizers.make_optimizer(section(name=name, weight_decay=0.0), 10, [v])
        seen = []
        run = type(optimizer).update_step

        def spy(self, gradient, *args):
            seen.append(gradient)
            return run(self, gradient, *args)

        optimizer.update_step = spy.__get__(optimizer)
        tf.function(lambda: strategy.run(lambda: optimizer.apply([tf.ones([2, 2])], [v])))()
        return v.numpy(), [s for s in optimizer.variables if s.path.endswith(('momentum', 'velocity'))]

    one, one_slots = weights_after(tf.distribute.OneDeviceStrategy('/cpu:0'))
    two, two_slots = weights_after(two_replicas())
    assert one == pytest.approx(two, abs=1e-7)
    for a, b in zip(one_slots, two_slots, strict=True):  # C45: the moments are those of one replica
        assert a.numpy() == pytest.approx(b.numpy(), abs=1e-7)


@pytest.mark.parametrize('name', ['adamw', 'adam', 'sgd'])
def test_matrices_decay_and_biases_and_gains_do_not(name):
    kernel, bias, gamma = variable([2, 2]), variable([2], 'bias'), variable([2], 'gamma')
    optimizer = optimizers.make_optimizer(
        section(name=name, weight_decay=0.5, learning_rate=0.1, schedule='constant'), 10, [kernel, bias, gamma]
    )
    optimizer.apply([tf.zeros([2, 2]), tf.zeros([2]), tf.zeros([2])], [kernel, bias, gamma])
    assert kernel.numpy() == pytest.approx(0.95 * np.ones([2, 2]))
    assert bias.numpy().tolist() == gamma.numpy().tolist() == [1, 1]


def lamb_by_hand(weights, gradients, decay, rate=0.1, beta_1=0.9, beta_2=0.999, epsilon=1e-6):
    """You et al. 2020, algorithm 2, on one layer, in float64."""
    m, v = np.zeros_like(weights), np.zeros_like(weights)
    for t, gradient in enumerate(gradients, 1):
        m, v = beta_1 * m + (1 - beta_1) * gradient, beta_2 * v + (1 - beta_2) * gradient**2
        update = m / (1 - beta_1**t) / (np.sqrt(v / (1 - beta_2**t)) + epsilon) + decay * weights
        norms = np.linalg.norm(weights), np.linalg.norm(update)
        weights = weights - rate * (norms[0] / norms[1] if all(norms) else 1.0) * update
    return weights


@pytest.mark.parametrize('replicas', [1, 2])
def test_two_steps_of_lamb_are_those_of_its_paper_and_its_trust_ratio_scales_the_decay_of_matrices(replicas):
    rng = np.random.default_rng(0)
    starts = {'kernel': rng.normal(size=[3, 2]), 'bias': rng.normal(size=[4]), 'zeros': np.zeros(5)}
    gradients = {name: rng.normal(size=[2, *start.shape]) for name, start in starts.items()}
    expected = {name: lamb_by_hand(starts[name], gradients[name], 0.5 * (name == 'kernel')) for name in starts}
    strategy = two_replicas() if replicas == 2 else tf.distribute.OneDeviceStrategy('/cpu:0')
    with strategy.scope():
        variables = [keras.Variable(start, dtype='float32', name=name) for name, start in starts.items()]
        lamb = section(name='lamb', weight_decay=0.5, learning_rate=0.1, schedule='constant')
        optimizer = optimizers.make_optimizer(lamb, 10, variables)
    step = tf.function(lambda *reduced: strategy.run(optimizer.apply, args=(reduced, variables)))
    for reduced in zip(*gradients.values(), strict=True):
        step(*[tf.constant(gradient, tf.float32) for gradient in reduced])
    for name, variable in zip(starts, variables, strict=True):
        copies = [copy.numpy() for copy in strategy.experimental_local_results(variable.value)]
        assert copies[0] == pytest.approx(expected[name], rel=1e-5), name
        assert np.array_equal(copies[0], copies[-1]), name


def test_lamb_leaves_a_layer_alone_that_has_neither_gradient_nor_decay():
    v = variable([2])
    optimizer = optimizers.make_optimizer(section(name='lamb', weight_decay=0.5), 10, [v])
    optimizer.apply([tf.zeros([2])], [v])
    assert v.numpy().tolist() == [1, 1]


@pytest.mark.parametrize('name', NAMES)
def test_every_slot_is_there_before_the_first_step(name):
    v = variable([2, 2])
    optimizer = optimizers.make_optimizer(section(name=name), 10, [v])
    before = len(optimizer.variables)
    optimizer.apply([tf.ones([2, 2])], [v])
    assert len(optimizer.variables) == before


@pytest.mark.parametrize('shape', ['linear', 'cosine', 'constant'])
@pytest.mark.parametrize('warmup_steps', [0, 1, 30])
def test_the_schedule_is_continuous_where_warm_up_meets_decay(shape, warmup_steps):
    schedule = optimizers.Schedule(2.0, 100, warmup_steps, shape)
    rates = np.array([float(schedule(step)) for step in np.arange(0, 100.01, 0.25)])
    steps = np.arange(0, 100.01, 0.25)
    assert float(schedule(warmup_steps)) == pytest.approx(2.0)
    assert rates[0] > 0
    assert np.all(np.diff(rates[steps <= warmup_steps]) > 0)
    assert np.all(np.diff(rates[steps >= warmup_steps]) <= 1e-6)
    # No step of a quarter changes the rate by more than the steepest slope allows.
    steepest = 2.0 * max(1 / (warmup_steps + 1), np.pi / 2 / (100 - warmup_steps))
    assert np.abs(np.diff(rates)).max() <= 0.25 * steepest + 1e-6
    assert rates[-1] == pytest.approx(2.0 if shape == 'constant' else 0.0, abs=1e-6)


def test_a_schedule_counts_steps_and_not_updates():
    one, three = optimizers.Schedule(1.0, 50, 10, 'cosine'), optimizers.Schedule(1.0, 50, 10, 'cosine', updates=3)
    assert [float(three(3 * step)) for step in range(50)] == [float(one(step)) for step in range(50)]


def test_a_warm_up_longer_than_the_run_rises_to_its_end():
    schedule = optimizers.Schedule(1.0, 10, 20, 'linear')
    rates = [float(schedule(step)) for step in range(10)]
    assert rates == sorted(rates) and rates[-1] < 1
