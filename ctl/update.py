"""A round of updates, in replica context: forward, weights reduced, gradients reduced, norm, clip, apply.

Whatever a model assigns while it runs (a batch norm's averages, the vectors of a spectral norm) is caught in a
`keras.StatelessScope` and comes out as values. So nothing changes behind the loop's back: these values are averaged
over the replicas, and only the objective that trains the model keeps them.
"""

import collections
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
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


@dataclasses.dataclass(frozen=True)
class Training:
    """What is trained, and how: all that is the same in every step.

    Attributes:
      optimizers: by the name of the objective, in the order of the experiment's.
      seed: of the run; folded with objective, step, update, replica and microbatch into the seed of a slice.
      microbatches: slices of a replica's batch.
      update_order: 'sequential' or 'joint', as in `Experiment.rounds`.
      fresh_batches: whether each update of a step has a batch of its own, or all share one.
      communication: how the replicas talk; None leaves it to the strategy.
    """

    experiment: Experiment
    optimizers: Mapping[str, keras.optimizers.Optimizer]
    seed: int
    microbatches: int = 1
    update_order: str = 'sequential'
    fresh_batches: bool = False
    communication: Communication = None

    @property
    def rounds(self) -> list[list[Objective]]:
        """The updates of a step, in order."""
        return self.experiment.rounds(self.update_order)

    @property
    def batches_per_step(self) -> int:
        return sum(map(len, self.rounds)) if self.fresh_batches else 1


class Turn(NamedTuple):
    """An objective that is about to be updated.

    Attributes:
      batch: this replica's features, [B, ...] each.
      seed: int64 [2], of this replica, step and update.
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
    """What adds up, first over a replica's slices and then over the replicas.

    Attributes:
      value: the part of the objective, float32 scalar.
      gradients: one tensor a variable.
      watched: the objective's watched metrics by name.
    """

    value: tf.Tensor
    gradients: list[tf.Tensor]
    watched: dict[str, WeightedSum]


class _State(NamedTuple):
    """Of what no gradient moves, the variables, or their values: floats, which replicas average, and others (counts,
    say), which are the same on every replica."""

    floats: list
    others: list


class _Part(NamedTuple):
    """A replica's part of an update: what it adds, and the values that its models' state has afterwards."""

    sums: _Sums
    state: _State


def run_losses(objective: Objective, batch: Batch, seed: Seed | None, state: Sequence[tuple] = ()):
    """The objective's losses and metrics, and the scope that has what its models would have assigned.

    `state` are pairs (Keras variable, the value it has).

    Raises:
      UserError: where a loss is not a pair: a mean would become a mean of means.
    """
    with keras.StatelessScope(state) as scope:
        returned = objective.losses(batch, seed)
    if not (isinstance(returned, Sequence) and len(returned) == 2 and all(isinstance(r, Mapping) for r in returned)):
        raise UserError(
            f'objective {objective.name}: losses() returned {type(returned).__name__}, not two dicts of name -> '
            'ctl.losses.WeightedSum: the losses, and the metrics, which may be empty.'
        )
    losses, metrics = ({name: _checked(objective, name, v) for name, v in named.items()} for named in returned)
    for name in objective.watched:
        if name not in metrics:
            raise UserError(f'objective {objective.name}: {name} is watched and not a metric; {nearest(name, metrics)}')
    return losses, metrics, scope


def _checked(objective: Objective, name: str, value: WeightedSum) -> WeightedSum:
    """A loss or metric as two float32 scalars; raises UserError where it is none."""
    if not isinstance(value, WeightedSum):
        raise UserError(
            f'objective {objective.name}: {name} is {type(value).__name__}, not a ctl.losses.WeightedSum. Return '
            'the sum over the slice and its weight; the loop divides by the weight of the global batch.'
        )
    for part, tensor in zip(value._fields, value, strict=True):
        shape = tf.convert_to_tensor(tensor).shape
        if shape.rank:
            raise UserError(
                f'objective {objective.name}: the {part} of {name} has the shape {list(shape)}, and is to be one '
                'number: the sum over the slice of the batch. ctl.losses.weighted_sum makes both.'
            )
    return WeightedSum(*(tf.cast(part, tf.float32) for part in value))


def _run_slice(
    turn: Turn,
    batch: Batch,
    seed: Seed,
    variables: _State,
    values: _State,
    weights: Mapping[str, tf.Tensor] | None = None,
) -> _Part:
    """One slice of a replica's batch, forward and backward.

    Args:
      variables: the state, which has `values` before.
      weights: each loss's over the global batch; None where the slice is all that the replica has, and so tells.
    """
    objective = turn.objective
    trained = [variable.value for variable in objective.variables]
    pairs = list(zip(tf.nest.flatten(variables), tf.nest.flatten(values), strict=True))
    with tf.GradientTape() as tape:
        losses, metrics, scope = run_losses(objective, batch, seed, pairs)
        if weights is None:
            weights = reduce.global_weights(losses)
        value = reduce.replica_objective(losses, weights)
    gradients = tape.gradient(value, trained)
    missing = [v.path for v, g in zip(objective.variables, gradients, strict=True) if g is None]
    if missing:
        raise UserError(
            f'objective {objective.name}: its losses do not depend on {", ".join(missing)}. '
            'Leave these out of its variables, or out of the model.'
        )
    watched = {name: WeightedSum(*(tf.cast(part, tf.float32) for part in metrics[name])) for name in objective.watched}
    sums = _Sums(value, [reduce.dense(gradient) for gradient in gradients], watched)
    return _Part(sums, tf.nest.map_structure(scope.get_current_value, variables))


def _global_weights(turn: Turn) -> dict[str, tf.Tensor]:
    """Each loss's weight over the global batch, before any slice of it has run.

    A weight depends on the batch alone, so of this call of the losses TensorFlow keeps the masks' arithmetic and prunes
    the model.
    """
    losses, _, _ = run_losses(turn.objective, turn.batch, turn.seed)
    return reduce.global_weights(losses)


def _run_replica(turn: Turn, variables: _State, microbatches: int) -> _Part:
    """This replica's batch, in `microbatches` slices one after the other, the state going from each to the next."""
    before = tf.nest.map_structure(lambda variable: tf.convert_to_tensor(variable.value), variables)
    if microbatches == 1:
        return _run_slice(turn, turn.batch, seeds.fold(turn.seed, 0), variables, before)

    weights = _global_weights(turn)
    slices = {name: tf.reshape(value, [microbatches, -1, *value.shape[1:]]) for name, value in turn.batch.items()}

    def add_slice(i: tf.Tensor, done: _Part) -> tuple[tf.Tensor, _Part]:
        one = {name: part[i] for name, part in slices.items()}
        more = _run_slice(turn, one, seeds.fold(turn.seed, i), variables, done.state, weights)
        return i + 1, _Part(tf.nest.map_structure(tf.add, done.sums, more.sums), more.state)

    nothing = _Sums(
        value=tf.constant(0.0),
        gradients=[tf.zeros(variable.shape, variable.dtype) for variable in turn.objective.variables],
        watched={name: WeightedSum(tf.constant(0.0), tf.constant(0.0)) for name in turn.objective.watched},
    )
    # One at a time: several in flight would need the memory that microbatches are there to save.
    _, whole = tf.while_loop(
        lambda i, _: i < microbatches,
        add_slice,
        (0, _Part(nothing, before)),
        parallel_iterations=1,
        maximum_iterations=microbatches,
    )
    return whole


def make_round(
    experiment: Experiment, turns: Sequence[Turn], microbatches: int, communication: Communication = None
) -> list[Outcome]:
    """An update of every objective whose turn it is, all from the same weights. In replica context.

    Raises:
      UserError: when it is called elsewhere, and for losses that cannot be reduced.
    """
    if tf.distribute.in_cross_replica_context():
        raise UserError('an update is made by each replica: call ctl.update.make_round inside strategy.run.')
    states = [_state(experiment, turn.objective) for turn in turns]
    parts = [_run_replica(turn, state, microbatches) for turn, state in zip(turns, states, strict=True)]
    totals = reduce.sum_over_replicas([(part.sums, part.state.floats) for part in parts], communication)
    outcomes = []
    for turn, variables, part, (sums, floats) in zip(turns, states, parts, totals, strict=True):
        norm = tf.linalg.global_norm([tf.cast(gradient, tf.float32) for gradient in sums.gradients])
        clipped = reduce.clip(sums.gradients, norm, turn.objective.optimizer.clip_norm)
        turn.optimizer.apply(clipped, turn.objective.variables)
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        after = _State([total / replicas for total in floats], part.state.others)
        reduce.assign_on_replicas(tf.nest.flatten(variables), tf.nest.flatten(after))
        watched = {name: tf.math.divide_no_nan(*pair) for name, pair in sums.watched.items()}
        outcomes.append(Outcome(sums.value, norm, sums.gradients, watched))
    return outcomes


def _state(experiment: Experiment, objective: Objective) -> _State:
    """The variables that an objective's updates change, and no gradient."""
    floats, others = [], []
    for variable in experiment.state(objective):
        (floats if tf.as_dtype(variable.dtype).is_floating else others).append(variable)
    return _State(floats, others)


def make_updates(training: Training, batches: Sequence[Batch], step: tf.Tensor) -> list[tuple[Objective, Outcome]]:
    """All updates of one step, round after round, in replica context.

    Args:
      batches: this replica's, one for each update, or one for all.
      step: int64 scalar, the number of the step.

    Returns:
      Each update's objective and what it came to, in order.
    """
    done, next_batch, outcomes = collections.Counter(), itertools.cycle(batches), []
    for objectives in training.rounds:
        turns = []
        for objective in objectives:
            turns.append(_turn(training, objective, next(next_batch), step, done[objective.name]))
            done[objective.name] += 1
        made = make_round(training.experiment, turns, training.microbatches, training.communication)
        outcomes += zip(objectives, made, strict=True)
    return outcomes


def _turn(training: Training, objective: Objective, batch: Batch, step: tf.Tensor, update: int) -> Turn:
    """The turn of an objective for its update number `update` of a step, and all that is random in it."""
    number = list(training.optimizers).index(objective.name)
    shared = seeds.fold(seeds.make(training.seed, number), step, update)
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    # No replica has the number -1, with which the seeds of records begin.
    batch = {**batch, 'example_seed': seeds.of_records(seeds.fold(shared, -1), batch['record'])}
    return Turn(objective, training.optimizers[objective.name], batch, seeds.fold(shared, replica))
