"""The replica step that strategy.run runs, and Orbit's trainer around it."""

import contextlib
import math
import time
from collections.abc import Iterator, Sequence

import keras
import orbit
import tensorflow as tf

from ctl import reduce
from ctl.experiment import Average, Batch, Objective
from ctl.names import ObjectiveNames, names_of
from ctl.nonfinite import NonFinite, snapshot
from ctl.runtime.stall import Watch
from ctl.update import Training, make_updates


def host_counter() -> tf.Variable:
    """A count of steps, int64, in the memory of the host, where seeds are made of it. Outside of a strategy's scope."""
    with tf.device('/cpu:0'):
        return tf.Variable(0, dtype=tf.int64, trainable=False, name='step')


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
        training: Training,
        nonfinite: NonFinite,
        report_every: int,
        step: tf.Variable,
        watch: Watch,
        count_skipped: bool = False,
        deterministic: bool = False,
    ):
        """In strategy.scope(); set `train_dataset` later.

        Args:
          nonfinite: what is done about steps that are not finite.
          report_every: steps between two reports.
          step: from `host_counter`.
          watch: is told of every inner loop.
          count_skipped: whether to count and report the examples of weight 0.
          deterministic: whether TensorFlow is to give the same bits from run to run.
        """
        super().__init__(train_dataset=None)
        self.step, self.strategy, self._training, self._nonfinite = step, strategy, training, nonfinite
        self._report_every, self._count_skipped, self._watch = report_every, count_skipped, watch
        # What tells the time is not the same from run to run, and refused then.
        self._now = (lambda: tf.numpy_function(time.time, [], tf.float64)) if deterministic else tf.timestamp
        self._objectives = tuple(training.experiment.objectives)
        of_objectives = [name for o in self._objectives for name in (*self._names(o), *o.watched)]
        names = dict.fromkeys(['steps', 'loss', *of_objectives])
        self._means = {name: tf.Variable(0.0, dtype=tf.float64, trainable=False, name=name) for name in names}
        self._examples_skipped = tf.Variable(0, dtype=tf.int64, trainable=False, name='skipped_examples')
        self.sums = {**self._means, 'skipped_examples': self._examples_skipped, **nonfinite.counts}
        self.seconds_per_step: float | None = None
        self._input_seconds = tf.Variable(0.0, dtype=tf.float64, trainable=False)
        self._timed_steps, self._timed_seconds = 0, 0.0  # of this process: a restart must not inflate the rate

    def train(self, num_steps: tf.Tensor) -> dict[str, float]:
        """An inner loop, as Orbit calls it."""
        with self._watch.loop(int(num_steps), self.seconds_per_step):
            return super().train(num_steps)

    def train_loop_begin(self):
        self._began_at_step, self._began = int(self.step.numpy()), time.perf_counter()

    def train_step(self, iterator):
        """One step, in cross-replica context, traced once."""
        keep_if = snapshot(self.strategy, self._changing()) if self._nonfinite.skip else None
        batches = [self._next_batch(iterator) for _ in range(self._training.batches_per_step)]
        with self._summaries_of(self.step + 1):
            results = self.strategy.run(self._replica_step, args=(batches, self.step))
        # Reduced already: every replica has the same.
        results = {name: self.strategy.experimental_local_results(value)[0] for name, value in results.items()}
        finite = self._nonfinite.guard(results.pop('each_finite'), self.step, keep_if)
        self._examples_skipped.assign_add(results.pop('skipped_examples'))
        for name, value in {**results, 'steps': 1.0}.items():
            value = tf.cast(value, tf.float64)
            if self._nonfinite.skip:
                value = tf.where(finite, value, tf.zeros_like(value))
            self._means[name].assign_add(value)
        with tf.control_dependencies([finite]):
            self.step.assign_add(1)

    @contextlib.contextmanager
    def _summaries_of(self, number: tf.Tensor) -> Iterator[None]:
        """What an experiment writes with tf.summary inside the `with` is of step `number`, 1 for the first, as reports
        are, and written when these are: so what comes again after a kill is known by its number.
        """
        before = tf.summary.experimental.get_step()
        tf.summary.experimental.set_step(number)
        try:
            with tf.summary.record_if(number % self._report_every == 0):
                yield
        finally:
            tf.summary.experimental.set_step(before)

    def _next_batch(self, iterator):
        """The next batch of every replica, and how long it took to come."""
        asked = self._now()
        with tf.control_dependencies([asked, self._watch.awaits_input.assign(True, read_value=False)]):
            batch = next(iterator)
        with tf.control_dependencies(self.strategy.experimental_local_results(batch['record'])):
            self._input_seconds.assign_add(self._now() - asked)
            self._watch.awaits_input.assign(False)
        return batch

    def take_input_seconds(self) -> float:
        """How long steps have waited for their batches since this was last asked."""
        seconds = float(self._input_seconds.numpy())
        self._input_seconds.assign(0.0)
        return seconds

    def _changing(self) -> list[tf.Variable]:
        """What a step changes, but for the optimizers' counts of steps, which schedules follow."""
        weights = [v for model in self._training.experiment.models.values() for v in model.variables]
        slots = [v for o in self._training.optimizers.values() for v in o.variables if v is not o.iterations]
        return [v.value for v in [*weights, *slots]]

    def _replica_step(self, batches: Sequence[Batch], step: tf.Tensor) -> dict[str, tf.Tensor]:
        """Numbers for the report, and `each_finite`, bool [objectives]: whether all values and norms of one are.

        Of an objective's updates in the step the mean value, the mean of what is watched, and the largest norm.

        Args:
          batches: one for each update of the step, or one for all.
        """
        results = {
            self._names(objective).learning_rate: tf.convert_to_tensor(
                self._training.optimizers[objective.name].learning_rate
            )
            for objective in self._objectives
        }
        updates, each_finite = make_updates(self._training, batches, step), []
        for objective in self._objectives:
            names, outcomes = self._names(objective), [outcome for of, outcome in updates if of is objective]
            values, norms = ([getattr(outcome, what) for outcome in outcomes] for what in ('value', 'norm'))
            # The largest norm, for a mean would hide the one update that was nearly lost.
            results |= {names.value: tf.reduce_mean(values), names.norm: tf.reduce_max(norms)}
            for name in objective.watched:
                results[name] = tf.reduce_mean([outcome.watched[name] for outcome in outcomes])
            each_finite.append(tf.reduce_all(tf.math.is_finite([*values, *norms])))
        for average in self._training.experiment.averages:
            _follow(average, step)
        loss = tf.add_n([results[self._names(objective).value] for objective in self._objectives])
        skipped = tf.zeros([], tf.int64)
        if self._count_skipped:
            skipped = tf.add_n([tf.reduce_sum(tf.cast(batch['example_weight'] == 0, tf.int64)) for batch in batches])
            skipped = reduce.sum_over_replicas(skipped, self._training.communication)
        return {**results, 'loss': loss, 'skipped_examples': skipped, 'each_finite': tf.stack(each_finite)}

    def _names(self, objective: Objective) -> ObjectiveNames:
        return names_of(objective, self._objectives)

    def train_loop_end(self) -> dict[str, float]:
        """Means since the last report, when one is due; otherwise nothing.

        Raises:
          GuardError: when the loss or gradient of a step was not finite, as `nonfinite` has it.
        """
        step, seconds = int(self.step.numpy()), time.perf_counter() - self._began
        self._timed_steps += step - self._began_at_step
        self._timed_seconds += seconds
        self.seconds_per_step = seconds / max(1, step - self._began_at_step)
        self._nonfinite.look(float(self._means['loss'].numpy()))
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


def _follow(average: Average, step: tf.Tensor) -> None:
    """Moves a model towards the one it follows, after step number `step`. In replica context."""
    step = tf.cast(step, tf.float32)
    decay = tf.minimum(average.decay, (1 + step) / (10 + step))

    def moved(follower: keras.Variable, followed: keras.Variable) -> tf.Tensor:
        old, new = tf.convert_to_tensor(follower.value), tf.convert_to_tensor(followed.value)
        return old + (1 - decay) * (new - old) if old.dtype.is_floating else new

    pairs = zip(average.model.variables, average.of.variables, strict=True)
    reduce.assign_on_replicas(average.model.variables, [moved(*pair) for pair in pairs])
