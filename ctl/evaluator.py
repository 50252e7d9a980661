"""Orbit's evaluator of an experiment: global sums over global weights, each record once."""

from collections.abc import Callable

import keras
import orbit
import tensorflow as tf

from ctl import seeds
from ctl.errors import UserError
from ctl.experiment import Batch, Experiment
from ctl.names import check_names
from ctl.update import run_losses


class Evaluator(orbit.StandardEvaluator):
    """Evaluates every loss and metric of the objectives, and the tallies, over batches of a dataset; changes nothing.

    A worker that cannot read its batch goes on with one of zeros, for the others wait for its part of their sums: until
    all know of it.

    Attributes:
      unread: why this worker could not read a batch of the last evaluation; None where it could.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        experiment: Experiment,
        dataset,
        check: Callable[[Exception | None], None],
    ):
        """`check` is told `unread` after every batch, and raises to end the evaluation."""
        # Orbit would make one function of reading a batch and computing with it, which fails whole.
        super().__init__(dataset, orbit.StandardEvaluatorOptions(use_tf_function=False))
        self._strategy, self._experiment, self._check = strategy, experiment, check
        self.unread: Exception | None = None
        self._losses: list[str] = []
        self._metrics: list[str] = []
        self._step = tf.function(self._batch_step, input_signature=[dataset.element_spec])

    def trace(self) -> list[str]:
        """Traces the evaluation of a batch, and computes nothing; the names of the numbers that come of one.

        Raises:
          UserError: for losses, metrics and tallies that cannot be evaluated, or whose names clash.
        """
        self._step.get_concrete_function()
        tallies = [name for tally in self._experiment.tallies for name in tally.names]
        return ['loss', *self._losses, *self._metrics, *tallies]

    def eval_begin(self):
        self.unread = None

    def eval_step(self, iterator):
        """Of one global batch: sums and weights, float32 [losses + metrics, 2], and each tally's sums by name."""
        if self.unread is None:
            try:
                batch = next(iterator)
            except tf.errors.OpError as error:
                self.unread = error
        if self.unread is not None:
            if self._strategy.cluster_resolver is None:
                raise self.unread
            # Other workers go on, and this one must compute with them, any numbers: where a size varies, 1 of them.
            spec = self._eval_dataset.element_spec
            zeros = [
                tf.zeros([1 if size is None else size for size in each.shape], each.dtype)
                for each in tf.nest.flatten(spec, expand_composites=True)
            ]
            batch = tf.nest.pack_sequence_as(spec, zeros, expand_composites=True)
        return self._step(batch)

    def _batch_step(self, batch):
        results = self._strategy.run(self._replica_step, args=(batch,))
        # One by one: with several workers TensorFlow takes a structure for one tensor.
        return tf.nest.map_structure(
            lambda value: self._strategy.reduce(tf.distribute.ReduceOp.SUM, value, axis=None), results
        )

    def _replica_step(self, batch: Batch):
        batch = {**batch, 'example_seed': seeds.of_records(seeds.make(0, 0), batch['record'])}
        named, losses, metrics = {}, {}, {}
        for objective in self._experiment.objectives:
            more_losses, more_metrics, _ = run_losses(objective, batch, None)
            named[f'objective {objective.name}'] = [*more_losses, *more_metrics]
            losses.update(more_losses)
            metrics.update(more_metrics)
        named['the tallies'] = [name for tally in self._experiment.tallies for name in tally.names]
        check_names(self._experiment, named)
        self._losses, self._metrics = list(losses), list(metrics)
        with keras.StatelessScope():
            tallies = [tally.sums(batch) for tally in self._experiment.tallies]
        tallies = [{name: tf.cast(value, tf.float64) for name, value in sums.items()} for sums in tallies]
        return tf.stack([tf.stack(pair) for pair in [*losses.values(), *metrics.values()]]), tallies

    def eval_reduce(self, state, step_outputs):
        self._check(self.unread)
        # Where the sums are, which may be on a GPU: the products of Inception's features are 100 MB.
        added = tf.nest.map_structure(lambda tensor: tf.cast(tensor, tf.float64), step_outputs)
        return added if state is None else tf.nest.map_structure(tf.add, state, added)

    def eval_end(self, totals) -> dict[str, float]:
        """`loss`, the objective over all records, every loss and metric by name, and the tallies' values.

        A loss or metric that nothing counted towards is 0.
        """
        if self.unread is not None:
            raise self.unread  # in one of the last batches
        pairs, tallies = tf.nest.map_structure(lambda tensor: tensor.numpy(), totals)
        means = {
            name: float(total / weight) if weight else 0.0
            for name, (total, weight) in zip([*self._losses, *self._metrics], pairs, strict=True)
        }
        for tally, sums in zip(self._experiment.tallies, tallies, strict=True):
            values = tally.values(sums)
            if values.keys() != set(tally.names):
                raise UserError(
                    f'the tally of {", ".join(tally.names)} has the values {", ".join(values)}: make `names` of '
                    'ctl.experiment.Tally what `values` returns.'
                )
            means.update(values)
        return {'loss': sum(means[name] for name in self._losses), **means}
