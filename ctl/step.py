"""One weight update: the replica step that strategy.run runs, and Orbit's trainer and evaluator around it."""

import math
import time
from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np
import orbit
import tensorflow as tf

from ctl import reduce
from ctl.errors import UserError
from ctl.experiment import Experiment, Objective
from ctl.losses import WeightedSum
from ctl.models.layers import Seed, fold
from ctl.nonfinite import NonFinite, snapshot

Batch = dict[str, tf.Tensor]


def _checked_losses(objective: Objective, batch: Batch, seed: Seed | None):
    """The objective's losses and metrics, refused where a loss is not a pair: a mean would be a mean of means."""
    losses, metrics = objective.losses(batch, seed)
    for name, value in {**losses, **metrics}.items():
        if not isinstance(value, WeightedSum):
            raise UserError(
                f'objective {objective.name}: {name} is {type(value).__name__}, not a ctl.losses.WeightedSum. Return '
                'the sum over the slice and its weight; the loop divides by the weight of the global batch.'
            )
    return losses, metrics


def _gradients(objective: Objective, batch: Batch, seed: Seed, weights: Callable[[Mapping], Mapping]):
    """Gradients of the replica's part of the objective over one slice, and that part, a scalar.

    `weights` maps the slice's losses to the global weight of each.
    """
    variables = [variable.value for variable in objective.variables]
    with tf.GradientTape() as tape:
        losses, _ = _checked_losses(objective, batch, seed)
        value = reduce.replica_objective(losses, weights(losses))
    gradients = tape.gradient(value, variables)
    missing = [v.path for v, g in zip(objective.variables, gradients, strict=True) if g is None]
    if missing:
        raise UserError(
            f'objective {objective.name}: its losses do not depend on {", ".join(missing)}. '
            'Leave these out of its variables, or out of the model.'
        )
    return [reduce.dense(gradient) for gradient in gradients], value


def _replica_gradients(objective: Objective, batch: Batch, seed: Seed, microbatches: int):
    """`_gradients` over this replica's batch, in `microbatches` slices one after the other."""
    if microbatches == 1:
        return _gradients(objective, batch, fold(seed, 0), reduce.global_weights)

    # The gradient of a slice needs the global weights, which need every slice. A weight depends on the batch only, so
    # of this first call TensorFlow keeps the masks' arithmetic and prunes the model.
    losses, _ = _checked_losses(objective, batch, seed)
    weights = reduce.global_weights(losses)
    slices = {name: tf.reshape(value, [microbatches, -1, *value.shape[1:]]) for name, value in batch.items()}

    def add_slice(i, gradients, value):
        one = {name: part[i] for name, part in slices.items()}
        more, part = _gradients(objective, one, fold(seed, i), lambda losses: weights)
        return i + 1, [a + b for a, b in zip(gradients, more, strict=True)], value + part

    zeros = [tf.zeros(variable.shape) for variable in objective.variables]
    # One at a time: several in flight would need the memory that microbatches are there to save.
    _, gradients, value = tf.while_loop(
        lambda i, *_: i < microbatches,
        add_slice,
        (0, zeros, 0.0),
        parallel_iterations=1,
        maximum_iterations=microbatches,
    )
    return gradients, value


def update(
    objective: Objective,
    optimizer: keras.optimizers.Optimizer,
    batch: Batch,
    seed: Seed,
    microbatches: int,
    communication: tf.distribute.experimental.CommunicationOptions | None = None,
):
    """One update of an objective's variables, in replica context.

    Order: forward, weights all-reduced, gradients, microbatches summed, gradients all-reduced, norm, clip, apply.

    Args:
      batch: this replica's features, [B, ...] each.
      seed: int32 [2], of this replica, step and update.

    Returns:
      The objective, the global norm of its gradient, float32 scalars, and that gradient before the clip, one tensor a
      variable; all equal on every replica.
    """
    gradients, value = _replica_gradients(objective, batch, seed, microbatches)
    *gradients, value = reduce.sum_over_replicas([*gradients, value], communication)
    norm = tf.linalg.global_norm(gradients)
    optimizer.apply(reduce.clip(gradients, norm, objective.optimizer.clip_norm), objective.variables)
    return value, norm, gradients


class Trainer(orbit.StandardTrainer):
    """Trains an experiment's objectives, in order, in every step.

    Attributes:
      step: int64 variable, the steps done. Counted here and nowhere else.
      sums: variables by name: float64, summed over the steps since the last report, and counts over all steps. They
        belong in the checkpoint, so that a resumed run reports what an unbroken one does.
      seconds_per_step: of the last inner loop; None before the first.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        experiment: Experiment,
        optimizers: Mapping[str, keras.optimizers.Optimizer],
        *,
        seed: int,
        microbatches: int,
        report_every: int,
        nonfinite: NonFinite,
        on_skipped: Callable[[list[int]], None] = lambda steps: None,
        count_skipped: bool = False,
        communication: tf.distribute.experimental.CommunicationOptions | None = None,
    ):
        """`optimizers` by objective name, the rest as in the config. In strategy.scope(); set `train_dataset` later.

        `on_skipped` is told the steps that `nonfinite` skipped; `count_skipped`: whether to count and report the
        examples of weight 0.
        """
        super().__init__(train_dataset=None)
        self.step = orbit.utils.create_global_step()
        self.strategy, self._models, self._optimizers = strategy, tuple(experiment.models.values()), dict(optimizers)
        self._objectives = tuple(experiment.objectives)
        of_objectives = [name for objective in self._objectives for name in self._names(objective)]
        names = dict.fromkeys(['steps', 'loss', *of_objectives])
        self._means = {name: tf.Variable(0.0, dtype=tf.float64, trainable=False, name=name) for name in names}
        self._examples_skipped = tf.Variable(0, dtype=tf.int64, trainable=False, name='skipped_examples')
        self.sums = {**self._means, 'skipped_examples': self._examples_skipped, **nonfinite.counts}
        self.seconds_per_step: float | None = None
        self._input_seconds = tf.Variable(0.0, dtype=tf.float64, trainable=False)
        self._timed_steps, self._timed_seconds = 0, 0.0  # of this process: a restart must not inflate the rate
        self._seed, self._microbatches, self._report_every = seed, microbatches, report_every
        self._count_skipped, self._communication = count_skipped, communication
        self._nonfinite, self._on_skipped = nonfinite, on_skipped

    def train_loop_begin(self):
        self._began_at_step, self._began = int(self.step.numpy()), time.perf_counter()

    def train_step(self, iterator):
        """One step, in cross-replica context, traced once."""
        put_back = snapshot(self.strategy, self._changing()) if self._nonfinite.skip else None
        results = self.strategy.run(self._replica_step, args=(self._next_batch(iterator), self.step))
        # Reduced already: every replica has the same.
        results = {name: self.strategy.experimental_local_results(value)[0] for name, value in results.items()}
        norms = [results[self._names(objective)[1]] for objective in self._objectives]
        finite = tf.reduce_all(tf.math.is_finite(tf.stack([results['loss'], *norms])))
        self._nonfinite.guard(finite, self.step, put_back)
        self._examples_skipped.assign_add(results.pop('skipped_examples'))
        for name, value in {**results, 'steps': 1.0}.items():
            value = tf.cast(value, tf.float64)
            if self._nonfinite.skip:
                value = tf.where(finite, value, tf.zeros_like(value))
            self._means[name].assign_add(value)
        self.step.assign_add(1)

    def _next_batch(self, iterator):
        """The next batch of every replica, and how long it took to come."""
        asked = tf.timestamp()
        with tf.control_dependencies([asked]):
            batch = next(iterator)
        with tf.control_dependencies(self.strategy.experimental_local_results(batch['record'])):
            self._input_seconds.assign_add(tf.timestamp() - asked)
        return batch

    def take_input_seconds(self) -> float:
        """How long steps have waited for their batches since this was last asked."""
        seconds = float(self._input_seconds.numpy())
        self._input_seconds.assign(0.0)
        return seconds

    def _changing(self) -> list[tf.Variable]:
        """What a step changes, but for the optimizers' counts of steps, which schedules follow."""
        weights = [v for model in self._models for v in model.variables]
        slots = [v for o in self._optimizers.values() for v in o.variables if v is not o.iterations]
        return [v.value for v in [*weights, *slots]]

    def _replica_step(self, batch: Batch, step: tf.Tensor) -> dict[str, tf.Tensor]:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        results, loss = {}, 0.0
        for number, objective in enumerate(self._objectives):
            value_name, norm_name, rate_name = self._names(objective)
            optimizer = self._optimizers[objective.name]
            for i in range(objective.updates):
                results[rate_name] = optimizer.learning_rate
                seed = fold(tf.constant([self._seed, number]), step, i, replica)
                results[value_name], results[norm_name], _ = update(
                    objective, optimizer, batch, seed, self._microbatches, self._communication
                )
            loss += results[value_name]
        skipped = tf.zeros([], tf.int64)
        if self._count_skipped:
            skipped = tf.reduce_sum(tf.cast(batch['example_weight'] == 0, tf.int64))
            (skipped,) = reduce.sum_over_replicas([skipped], self._communication)
        return {**results, 'loss': loss, 'skipped_examples': skipped}

    def _names(self, objective: Objective) -> tuple[str, str, str]:
        """What an objective, its gradient norm and its learning rate are called; a single objective is the loss."""
        if len(self._objectives) == 1:
            return 'loss', 'gradient_norm', 'learning_rate'
        return tuple(f'{objective.name}_{what}' for what in ('objective', 'gradient_norm', 'learning_rate'))

    def train_loop_end(self) -> dict[str, float]:
        """Means since the last report, when one is due; otherwise nothing.

        Raises:
          GuardError: when the loss or gradient of a step was not finite, as `nonfinite` has it.
        """
        step, seconds = int(self.step.numpy()), time.perf_counter() - self._began
        self._timed_steps += step - self._began_at_step
        self._timed_seconds += seconds
        self.seconds_per_step = seconds / max(1, step - self._began_at_step)
        skipped = self._nonfinite.look(float(self._means['loss'].numpy()))
        if skipped:
            self._on_skipped(skipped)
        if step % self._report_every:
            return {}
        report = {name: float(variable.numpy()) for name, variable in self._means.items()}
        steps = report.pop('steps')
        report = {name: value / steps if steps else math.nan for name, value in report.items()}
        if self._count_skipped:
            report['skipped_examples'] = int(self._examples_skipped.numpy())
        if self._nonfinite.skip:
            report['nonfinite_steps'] = int(self._nonfinite.counts['nonfinite_steps'].numpy())
        report['steps_per_second'] = self._timed_steps / self._timed_seconds
        self._timed_steps, self._timed_seconds = 0, 0.0
        for variable in self._means.values():
            variable.assign(0.0)
        return report


class Evaluator(orbit.StandardEvaluator):
    """Evaluates every loss and metric of the objectives over a finite dataset: global sum over global weight."""

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        objectives: Sequence[Objective],
        dataset,
        check: Callable[[], None] = lambda: None,
    ):
        """`check` is called after every step, and may raise to end the evaluation."""
        super().__init__(dataset)
        self._strategy, self._objectives, self._check = strategy, tuple(objectives), check
        self._losses: list[str] = []
        self._metrics: list[str] = []

    def eval_begin(self):
        return np.zeros([])

    def eval_step(self, iterator) -> tf.Tensor:
        """Sums and weights of one global batch, float32 [losses + metrics, 2]."""

        def replica_step(batch: Batch) -> tf.Tensor:
            losses, metrics = {}, {}
            for objective in self._objectives:
                more_losses, more_metrics = _checked_losses(objective, batch, None)
                twice = (losses.keys() | metrics.keys()) & (more_losses.keys() | more_metrics.keys())
                if twice:
                    raise UserError(f'objective {objective.name}: another objective has {", ".join(twice)}; rename it.')
                losses.update(more_losses)
                metrics.update(more_metrics)
            self._losses, self._metrics = list(losses), list(metrics)
            return tf.stack([tf.stack(pair) for pair in [*losses.values(), *metrics.values()]])

        pairs = self._strategy.run(replica_step, args=(next(iterator),))
        return self._strategy.reduce(tf.distribute.ReduceOp.SUM, pairs, axis=None)

    def eval_reduce(self, state: np.ndarray, step_outputs: tf.Tensor) -> np.ndarray:
        self._check()
        return state + step_outputs.numpy().astype(np.float64)

    def eval_end(self, totals: np.ndarray) -> dict[str, float]:
        """`loss`, the objective over all records, and every loss and metric by name; 0 where nothing counted."""
        means = {
            name: float(total / weight) if weight else 0.0
            for name, (total, weight) in zip([*self._losses, *self._metrics], totals, strict=True)
        }
        return {'loss': sum(means[name] for name in self._losses), **means}
