"""A round of updates, in replica context: forward, weights reduced, gradients reduced, norm, clip, apply.

Whatever a model assigns while it runs (a batch norm's averages, the vectors of a spectral norm) is caught in a
`keras.StatelessScope` and comes out as values. So nothing changes behind the loop's back: these values are averaged
over the replicas, and only the objective that trains the model keeps them.
"""

import collections
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from ctl import reduce, seeds
from ctl.config import nearest
from ctl.errors import UserError
from ctl.experiment import Batch, Experiment, Objective
from ctl.losses import WeightedSum
from ctl.seeds import Seed

Communication = tf.distribute.experimental.CommunicationOptions | None


class Turn(NamedTuple):
    """An objective that is about to be updated.

    Attributes:
      batch: this replica's features, [B, ...] each.
      seed: int32 [2], of this replica, step and update.
    """

    objective: Objective
    optimizer: keras.optimizers.Optimizer
    batch: Batch
    seed: Seed


class Outcome(NamedTuple):
    """What an update came to, the same on every replica.

    Attributes:
      value: the objective, float32 scalar.
      norm: the global norm of its gradient, float32 scalar.
      gradients: before the clip, one tensor a variable.
      watched: the objective's watched metrics by name, float32 scalars.
    """

    value: tf.Tensor
    norm: tf.Tensor
    gradients: list[tf.Tensor]
    watched: dict[str, tf.Tensor]


class _Sums(NamedTuple):
    """What one replica adds to an update: its part of the objective, the gradients, the watched pairs [n, 2]; and the
    values that its models' state has afterwards."""

    value: tf.Tensor
    gradients: list[tf.Tensor]
    watched: tf.Tensor
    state: list[tf.Tensor]


def run_losses(objective: Objective, batch: Batch, seed: Seed | None, state: Sequence[tuple] = ()):
    """The objective's losses and metrics, and the scope that has what its models would have assigned.

    `state` are pairs (Keras variable, the value it has).

    Raises:
      UserError: where a loss is not a pair: a mean would become a mean of means.
    """
    with keras.StatelessScope(state) as scope:
        losses, metrics = objective.losses(batch, seed)
    for name, value in {**losses, **metrics}.items():
        if not isinstance(value, WeightedSum):
            raise UserError(
                f'objective {objective.name}: {name} is {type(value).__name__}, not a ctl.losses.WeightedSum. Return '
                'the sum over the slice and its weight; the loop divides by the weight of the global batch.'
            )
    for name in objective.watched:
        if name not in metrics:
            raise UserError(f'objective {objective.name}: {name} is watched and not a metric; {nearest(name, metrics)}')
    return losses, metrics, scope


def _run_slice(
    turn: Turn, batch: Batch, seed: Seed, weights: Callable[[Mapping], Mapping], state: Sequence[tuple]
) -> _Sums:
    """One slice of a replica's batch, forward and backward; `weights` maps its losses to the global weight of each."""
    objective = turn.objective
    variables = [variable.value for variable in objective.variables]
    with tf.GradientTape() as tape:
        losses, metrics, scope = run_losses(objective, batch, seed, state)
        value = reduce.replica_objective(losses, weights(losses))
    gradients = tape.gradient(value, variables)
    missing = [v.path for v, g in zip(objective.variables, gradients, strict=True) if g is None]
    if missing:
        raise UserError(
            f'objective {objective.name}: its losses do not depend on {", ".join(missing)}. '
            'Leave these out of its variables, or out of the model.'
        )
    watched = [tf.stack(metrics[name]) for name in objective.watched]
    return _Sums(
        value,
        [reduce.dense(gradient) for gradient in gradients],
        tf.stack(watched) if watched else tf.zeros([0, 2]),
        [scope.get_current_value(variable) for variable, _ in state],
    )


def _run_replica(turn: Turn, state: Sequence[keras.Variable], microbatches: int) -> _Sums:
    """This replica's batch, in `microbatches` slices one after the other."""
    before = [variable.value for variable in state]
    if microbatches == 1:
        return _run_slice(
            turn, turn.batch, seeds.fold(turn.seed, 0), reduce.global_weights, list(zip(state, before, strict=True))
        )

    # The gradient of a slice needs the global weights, which need every slice. A weight depends on the batch only, so
    # of this first call TensorFlow keeps the masks' arithmetic and prunes the model.
    losses, _, _ = run_losses(turn.objective, turn.batch, turn.seed)
    weights = reduce.global_weights(losses)
    slices = {name: tf.reshape(value, [microbatches, -1, *value.shape[1:]]) for name, value in turn.batch.items()}

    def add_slice(i, value, gradients, watched, values):
        one = {name: part[i] for name, part in slices.items()}
        more = _run_slice(
            turn, one, seeds.fold(turn.seed, i), lambda losses: weights, list(zip(state, values, strict=True))
        )
        gradients = [a + b for a, b in zip(gradients, more.gradients, strict=True)]
        return i + 1, value + more.value, gradients, watched + more.watched, more.state

    zeros = [tf.zeros(variable.shape) for variable in turn.objective.variables]
    # One at a time: several in flight would need the memory that microbatches are there to save.
    _, *sums = tf.while_loop(
        lambda i, *_: i < microbatches,
        add_slice,
        (0, 0.0, zeros, tf.zeros([len(turn.objective.watched), 2]), [tf.convert_to_tensor(value) for value in before]),
        parallel_iterations=1,
        maximum_iterations=microbatches,
    )
    return _Sums(*sums)


def make_round(
    experiment: Experiment, turns: Sequence[Turn], microbatches: int, communication: Communication = None
) -> list[Outcome]:
    """An update of every objective whose turn it is, all from the same weights. In replica context.

    Raises:
      UserError: when it is called elsewhere, and for losses that cannot be reduced.
    """
    if tf.distribute.in_cross_replica_context():
        raise UserError('an update is made by each replica: call ctl.update.make_round inside strategy.run.')
    states = [experiment.state(turn.objective) for turn in turns]
    sums = [_run_replica(turn, state, microbatches) for turn, state in zip(turns, states, strict=True)]
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    reduced = reduce.sum_over_replicas([t for each in sums for t in _to_reduce(each)], communication)
    outcomes = []
    for turn, state, mine in zip(turns, states, sums, strict=True):
        count = len(_to_reduce(mine))
        (value, *gradients), rest = reduced[: 1 + len(mine.gradients)], reduced[1 + len(mine.gradients) : count]
        reduced = reduced[count:]
        norm = tf.linalg.global_norm(gradients)
        turn.optimizer.apply(reduce.clip(gradients, norm, turn.objective.optimizer.clip_norm), turn.objective.variables)
        watched = {}
        if turn.objective.watched:
            pairs, *rest = rest
            watched = dict(zip(turn.objective.watched, tf.unstack(_means(pairs)), strict=True))
        # The state of floats is averaged; anything else is counted alike on every replica.
        averages = iter(rest)
        values = [next(averages) / replicas if _is_float(value) else value for value in mine.state]
        reduce.assign_on_replicas(state, values)
        outcomes.append(Outcome(value, norm, gradients, watched))
    return outcomes


def make_updates(
    experiment: Experiment,
    optimizers: Mapping[str, keras.optimizers.Optimizer],
    rounds: Sequence[Sequence[Objective]],
    batches: Sequence[Batch],
    step: tf.Tensor,
    seed: int,
    microbatches: int,
    communication: Communication = None,
) -> list[tuple[Objective, Outcome]]:
    """All updates of one step, round after round, in replica context.

    Args:
      batches: this replica's, one for each update, or one for all.
      step: int64 scalar, the number of the step.
      seed: of the run; folded with objective, step, update and replica into the seed of an update.

    Returns:
      Each update's objective and what it came to, in order.
    """
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    done, next_batch, outcomes = collections.Counter(), itertools.cycle(batches), []
    for objectives in rounds:
        turns = []
        for objective in objectives:
            number = list(optimizers).index(objective.name)
            shared = seeds.fold(tf.constant([seed, number]), step, done[objective.name])
            done[objective.name] += 1
            batch = next(next_batch)
            batch = {**batch, 'example_seed': seeds.of_records(shared, batch['record'])}
            turns.append(Turn(objective, optimizers[objective.name], batch, seeds.fold(shared, replica)))
        outcomes += zip(objectives, make_round(experiment, turns, microbatches, communication), strict=True)
    return outcomes


def _to_reduce(sums: _Sums) -> list[tf.Tensor]:
    watched = [sums.watched] if sums.watched.shape[0] else []
    return [sums.value, *sums.gradients, *watched, *filter(_is_float, sums.state)]


def _is_float(value: tf.Tensor) -> bool:
    return value.dtype.is_floating


def _means(pairs: tf.Tensor) -> tf.Tensor:
    """[n, 2] of sums and weights -> [n]."""
    return tf.math.divide_no_nan(pairs[:, 0], pairs[:, 1])
