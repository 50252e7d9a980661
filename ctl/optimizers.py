"""From a config section to a schedule and a Keras optimizer that leaves the all-reduce to us."""

import math
from collections.abc import Sequence

import keras
import ml_collections
import tensorflow as tf


class _Reduced:
    """Mixin: the gradients are summed over the replicas already; do not sum them again.

    Keras 3 has no public switch for this. A test fails if it renames the method.
    """

    def _all_reduce_sum_gradients(self, grads_and_vars):
        return grads_and_vars


class AdamW(_Reduced, keras.optimizers.AdamW):
    pass


class Adam(_Reduced, keras.optimizers.Adam):
    pass


class SGD(_Reduced, keras.optimizers.SGD):
    pass


class Lamb(_Reduced, keras.optimizers.Lamb):
    """You et al. 2020, "Large batch optimization for deep learning: training BERT in 76 minutes", algorithm 2.

    The slots are Keras's, the step is not: Keras lets weights decay before it, where the trust ratio does not reach.
    Every variable is a layer of its own.
    """

    def __init__(self, *args, decay: float = 0.0, **kwargs):
        """`decay` is the paper's lambda, for the variables that `decays` names; the rest is as in Keras."""
        super().__init__(*args, **kwargs)
        self.decay = decay  # `weight_decay` would be Keras's own, outside of the trust ratio

    def update_step(self, gradient, variable, learning_rate):
        """One step of one variable; `gradient` and `variable` of one shape, `learning_rate` a scalar."""
        gradient, learning_rate = tf.cast(gradient, variable.dtype), tf.cast(learning_rate, variable.dtype)
        number, calls = self._get_variable_index(variable), tf.cast(self.iterations + 1, variable.dtype)
        m, v = self._momentums[number], self._velocities[number]
        self.assign(m, self.beta_1 * m + (1 - self.beta_1) * gradient)
        self.assign(v, self.beta_2 * v + (1 - self.beta_2) * gradient**2)
        m_hat, v_hat = m / (1 - self.beta_1**calls), v / (1 - self.beta_2**calls)
        update = m_hat / (tf.sqrt(v_hat) + self.epsilon)
        if decays(variable):
            update += self.decay * variable
        weight_norm, update_norm = tf.norm(variable), tf.norm(update)
        ratio = tf.math.divide_no_nan(weight_norm, update_norm)
        trust_ratio = tf.where(ratio > 0, ratio, tf.ones_like(ratio))
        self.assign_sub(variable, learning_rate * trust_ratio * update)

    def get_config(self) -> dict:
        return {**super().get_config(), 'decay': self.decay}


@keras.saving.register_keras_serializable('ctl')
class Schedule(keras.optimizers.schedules.LearningRateSchedule):
    """Linear warm-up, then linear, cosine or no decay; both parts are 1 x the peak at step `warmup_steps`.

    Warm-up starts above 0, so that the first step is not wasted: step k has (k + 1) / (warmup_steps + 1) of the peak.
    Cosine: Loshchilov and Hutter 2017, "SGDR", equation 5, without restarts.
    """

    def __init__(self, peak: float, steps: int, warmup_steps: int, shape: str, updates: int = 1):
        """Decay reaches 0 at `steps`, one step after the last.

        Args:
          peak: the largest learning rate.
          steps, warmup_steps: in steps of the loop.
          shape: 'linear', 'cosine' or 'constant'.
          updates: calls of the optimizer in one step.
        """
        self.peak, self.steps, self.warmup_steps, self.shape = peak, steps, warmup_steps, shape
        self.updates = updates

    def __call__(self, iteration) -> tf.Tensor:
        """The learning rate of the optimizer's 0-based call `iteration`, float32 scalar."""
        step = tf.cast(iteration, tf.float32) / self.updates
        warm = (step + 1) / (self.warmup_steps + 1)
        done = tf.clip_by_value((step - self.warmup_steps) / max(1, self.steps - self.warmup_steps), 0.0, 1.0)
        decay = {
            'linear': lambda: 1 - done,
            'cosine': lambda: (1 + tf.cos(math.pi * done)) / 2,
            'constant': lambda: tf.ones_like(done),
        }[self.shape]()
        return self.peak * tf.minimum(warm, decay)

    def get_config(self) -> dict:
        names = ('peak', 'steps', 'warmup_steps', 'shape', 'updates')
        return {name: getattr(self, name) for name in names}


def make_schedule(section: ml_collections.ConfigDict, steps: int, updates: int = 1) -> Schedule:
    """The schedule of an optimizer's config section in a run of `steps`, of `updates` calls in a step."""
    return Schedule(section.learning_rate, steps, section.warmup_steps, section.schedule, updates)


def decays(variable: keras.Variable) -> bool:
    """Whether weight decay applies: to matrices, not to biases, LayerNorm's gains or other vectors."""
    return len(variable.shape) > 1


def make_optimizer(
    section: ml_collections.ConfigDict, steps: int, variables: Sequence[keras.Variable], updates: int = 1
) -> keras.optimizers.Optimizer:
    """The optimizer of a config section, with every slot of `variables` built.

    Weight decay is decoupled (Loshchilov and Hutter 2019, "Decoupled weight decay regularization") in adamw, adam and
    sgd: a weight shrinks by learning_rate x weight_decay of itself before the update, so that 'adam' with weight decay
    is AdamW. In lamb weight_decay x weight is part of the update, and the trust ratio scales both.

    Args:
      section: the settings of settings.OPTIMIZER.
      steps: in the whole run, for the schedule.
      variables: what it will update.
      updates: its calls in one step.
    """
    schedule = make_schedule(section, steps, updates)
    betas = {'beta_1': section.beta_1, 'beta_2': section.beta_2, 'epsilon': 1e-6}
    if section.name == 'adamw':
        optimizer = AdamW(schedule, weight_decay=section.weight_decay, **betas)
    elif section.name == 'adam':
        optimizer = Adam(schedule, weight_decay=section.weight_decay or None, **betas)
    elif section.name == 'lamb':
        optimizer = Lamb(schedule, decay=section.weight_decay, **betas)
    else:
        optimizer = SGD(schedule, weight_decay=section.weight_decay or None, momentum=section.beta_1)
    kept = [variable for variable in variables if not decays(variable)]
    if kept:
        optimizer.exclude_from_weight_decay(var_list=kept)
    optimizer.build(list(variables))
    return optimizer
