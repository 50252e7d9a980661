"""Does an experiment make the same update on any number of replicas? Runs it on each and compares, dropout off.

    python -m tools.check_replicas --experiment=bert_mlm [--replicas=1,2,4] [--microbatches=1,2] [--steps=5]

Every topology starts from the same weights and reads the same records; what a GAN draws, it draws for each record.
What differs from the first by more than the tolerance, relative to the norm, ends with exit code 3. The losses are also
taken apart on one batch, to name the cause: sums and weights over two halves of a batch must add up to those over the
whole, and so must the gradients.
"""

import itertools
import sys
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from absl import flags as absl_flags

from ctl import config as config_lib
from ctl import flags
from ctl.command_line import say_aside
from ctl.errors import GuardError, UserError
from ctl.experiment import make_experiment

# Relative to the norm. Adam divides by gradients that may be near zero, which makes rounding larger.
TOLERANCE = 1e-4
# Variables listed, those that differ most first.
MOST_VARIABLES = 10


def _define(values: absl_flags.FlagValues) -> None:
    absl_flags.DEFINE_list('replicas', ['1', '2', '4'], 'numbers of replicas to compare', flag_values=values)
    absl_flags.DEFINE_list('microbatches', ['1', '2'], 'numbers of microbatches, each with each', flag_values=values)
    absl_flags.DEFINE_integer('steps', 5, 'weight updates', lower_bound=1, flag_values=values)


PROGRAM = flags.ExperimentProgram('tools.check_replicas', __doc__, _define, only_reads=True)


def main(argv: list[str]) -> int:
    """Runs one command line, without the program's name, and returns the exit code."""
    return PROGRAM.run(argv, check)


def check(request: flags.ExperimentRequest) -> None:
    """Does what is asked for; raises UserError and GuardError."""
    from ctl.runtime import devices

    topologies = list(itertools.product(_numbers(request, 'replicas'), _numbers(request, 'microbatches')))
    most = max(replicas for replicas, _ in topologies)
    config = request.config
    _make_comparable(config)
    config.devices.replicas, config.devices.strategy = most, 'auto'
    devices.make_strategy(config.devices)  # the virtual devices, before anything else
    source, layout = _read_data(request)

    causes = _causes(request, source, layout)
    results = {topology: _train(request, source, layout, *topology) for topology in topologies}
    first = topologies[0]
    worst = 0.0
    for topology in topologies[1:]:
        differences = _differences(results[first], results[topology])
        worst = max(worst, *(value for parts in differences.values() for value in parts.values()))
        _print_table(first, topology, differences)
    for cause in causes:
        print(f'cause: {cause}')
    if worst > TOLERANCE or causes:
        found = (
            f'the largest difference is {worst:.1e}, and {TOLERANCE:g} is allowed' if worst > TOLERANCE else causes[0]
        )
        usual = (
            'The usual causes: a mean taken inside the replica, a clip before the reduce, batch statistics, random '
            'numbers that do not come from `seed`.'
        )
        raise GuardError(f'the update depends on the replicas: {found}. {usual}')
    print(f'The update is the same on all: the largest difference is {worst:.1e}; {TOLERANCE:g} is allowed.')


def _make_comparable(config) -> None:
    """Turns off what is drawn for a whole replica: dropout; and a GAN's noise, which is drawn for each record then."""
    for key in config_lib.flatten(config):
        name = key.rpartition('.')[2]
        if name.endswith('dropout'):
            config_lib.set_value(config, key, 0.0)
        if name == 'noise' and 'record' in getattr(config_lib.setting(key), 'choices', ()):
            config_lib.set_value(config, key, 'record')


def _numbers(request: flags.ExperimentRequest, name: str) -> list[int]:
    words = request.own[name]
    if not words or not all(word.isdigit() and int(word) for word in words):
        raise UserError(f'--{name}={",".join(words)}: expected whole numbers above 0, like 1,2,4.')
    return [int(word) for word in words]


def _read_data(request: flags.ExperimentRequest):
    """The training records, and their layout."""
    from ctl.data import choices, records
    from ctl.data.inputs import choose_data, find_data

    config = request.config
    unit = int(np.lcm.reduce(_numbers(request, 'replicas')))
    for microbatches in _numbers(request, 'microbatches'):
        choices.check_batch(config.train.global_batch_size, unit, microbatches)
    default_data = choose_data(request.name, request.module, config, say_aside, request.stored)
    data = find_data(config, unit, default_data, say_aside)
    experiment = make_experiment(request.module, config)
    return records.make_source(data.train, experiment, data.bad), data.layout


def _make(request: flags.ExperimentRequest):
    """The experiment and its optimizers, with the same initial weights every time. In strategy.scope()."""
    import keras

    from ctl.optimizers import make_optimizer

    config = request.config
    keras.utils.set_random_seed(config.train.seed)
    experiment = make_experiment(request.module, config)
    optimizers = {
        o.name: make_optimizer(o.optimizer, config.train.steps, o.variables, o.updates) for o in experiment.objectives
    }
    return experiment, optimizers


def _train(
    request: flags.ExperimentRequest, source, layout, replicas: int, microbatches: int
) -> dict[str, dict[str, np.ndarray]]:
    """What a topology comes to: losses by step, gradients of the first step and weights after the last, by name."""
    import keras
    import tensorflow as tf

    from ctl.data import pipeline
    from ctl.runtime import devices

    config = request.config.copy_and_resolve_references()
    config.devices.replicas = replicas
    strategy = devices.make_strategy(config.devices)
    keras.utils.clear_session()
    devices.set_precision(config.train.precision)
    with strategy.scope():
        experiment, optimizers = _make(request)
    make_step = _make_step(config, strategy, experiment, optimizers, microbatches)
    read = iter(pipeline.distribute(strategy, pipeline.make_train_dataset_fn(source, layout, 0), per_replica=False))

    losses, first_gradients = {}, {}
    for step in range(request.own['steps']):
        batches = [next(read) for _ in experiment.update_names(config.train)]
        loss, gradients = make_step(batches, tf.constant(step, tf.int64))
        losses[f'step {step}'] = loss.numpy()
        first_gradients = first_gradients or {name: gradient.numpy() for name, gradient in gradients.items()}
    weights = {v.path: v.numpy() for model in experiment.models.values() for v in model.variables}
    return {'losses': losses, 'gradients': first_gradients, 'weights': weights}


def _make_step(config, strategy, experiment, optimizers, microbatches: int) -> Callable:
    """`(global batches, step) -> (the sum of all updates' objectives, the last gradient of each variable by path)`."""
    import tensorflow as tf

    from ctl.update import Training, make_updates

    training = Training(experiment, optimizers, config.train.seed, microbatches, config.train.update_order)

    def replica_step(batches, step):
        outcomes = make_updates(training, batches, step)
        gradients = {
            variable.path: gradient
            for objective, outcome in outcomes
            for variable, gradient in zip(objective.variables, outcome.gradients, strict=True)
        }
        return tf.add_n([outcome.value for _, outcome in outcomes]), gradients

    @tf.function
    def step_of(batches, step):
        outcome = strategy.run(replica_step, args=(batches, step))
        return tf.nest.map_structure(lambda value: strategy.experimental_local_results(value)[0], outcome)

    return step_of


def _differences(expected: dict, found: dict) -> dict[str, dict[str, float]]:
    """Norm of the difference over the norm of the expected, for every part of every kind."""

    def difference(a: np.ndarray, b: np.ndarray, scale: float) -> float:
        found = float(np.linalg.norm(np.asarray(a, np.float64) - b) / scale) if scale else 0.0
        return found if np.isfinite(found) else np.inf  # and no nan, which is larger than nothing

    differences = {}
    for kind, parts in expected.items():
        # A gradient that should be zero is compared with the others, and not with its own rounding.
        least = 1e-3 * max(float(np.linalg.norm(part)) for part in parts.values())
        differences[kind] = {
            name: difference(part, found[kind][name], max(float(np.linalg.norm(part)), least))
            for name, part in parts.items()
        }
    return differences


def _print_table(first: tuple[int, int], topology: tuple[int, int], differences: dict[str, dict[str, float]]) -> None:
    names = [f'{replicas} replicas x {microbatches} microbatches' for replicas, microbatches in (first, topology)]
    largest = {kind: max(parts.values()) for kind, parts in differences.items()}
    print(f'{names[1]} against {names[0]}: ' + ', '.join(f'{kind} {value:.1e}' for kind, value in largest.items()))
    both = differences['gradients'].keys() & differences['weights'].keys()
    rows = sorted(both, key=lambda name: -differences['gradients'][name])
    rows = [name for name in rows if max(differences[k][name] for k in ('gradients', 'weights')) > TOLERANCE]
    for name in rows[:MOST_VARIABLES]:
        print(f'  {name}: gradient {differences["gradients"][name]:.1e}, weight {differences["weights"][name]:.1e}')
    if len(rows) > MOST_VARIABLES:
        print(f'  and {len(rows) - MOST_VARIABLES} more variables')


class _Measured(NamedTuple):
    """A loss on some examples: its sum, its weight, and the gradient of the sum, all variables end to end."""

    sum: float
    weight: float
    gradient: np.ndarray


def _causes(request: flags.ExperimentRequest, source, layout) -> list[str]:
    """What in the losses makes them depend on how a batch is cut, in words."""
    import keras
    import tensorflow as tf

    from ctl import seeds
    from ctl.data import pipeline

    keras.utils.clear_session()
    experiment, _ = _make(request)
    batch = next(iter(pipeline.make_train_dataset_fn(source, layout, 0)(tf.distribute.InputContext())))
    batch['example_seed'] = seeds.of_records(seeds.make(0, 0), batch['record'])
    half = layout.global_batch_size // 2
    halves = [{k: v[:half] for k, v in batch.items()}, {k: v[half:] for k, v in batch.items()}]
    causes = []
    for objective in experiment.objectives:
        whole, again, first, second = (_measure(objective, each) for each in (batch, batch, *halves))
        for name in whole:
            cause = _cause(whole[name], again[name], first[name], second[name])
            if cause:
                causes.append(f'objective {objective.name}, {name}: {cause}')
    return causes


def _measure(objective, batch: dict) -> dict[str, _Measured]:
    """Every loss of an objective on a batch, by name; with the same seed every time."""
    import tensorflow as tf

    from ctl import seeds
    from ctl.update import run_losses

    variables = [variable.value for variable in objective.variables]
    with tf.GradientTape(persistent=True) as tape:
        losses, _, _ = run_losses(objective, batch, seeds.make(0, 0))
    measured = {}
    for name, pair in losses.items():
        gradients = tape.gradient(pair.sum, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        flat = np.concatenate([tf.convert_to_tensor(gradient).numpy().ravel() for gradient in gradients])
        measured[name] = _Measured(float(pair.sum), float(pair.weight), flat)
    return measured


def _cause(whole: _Measured, again: _Measured, first: _Measured, second: _Measured) -> str:
    """Why a loss on a batch, measured twice, is not what its halves add up to; '' where it is."""
    if not _close(whole.sum, again.sum):
        return (
            f'twice on the same batch, it is {whole.sum:.6g} and {again.sum:.6g}: random numbers that do not come '
            'from `seed`.'
        )
    if not _close(whole.weight, first.weight + second.weight):
        return (
            f'its weight is {whole.weight:.6g} on a batch, and {first.weight:.6g} + {second.weight:.6g} on its halves: '
            'a mean taken inside the replica. Return the sum, and the weight to divide it by.'
        )
    if not _close(whole.sum, first.sum + second.sum):
        return (
            f'its sum is {whole.sum:.6g} on a batch, and {first.sum:.6g} + {second.sum:.6g} on its halves: batch '
            'statistics, a mean taken inside the replica, or something else that mixes examples.'
        )
    difference = np.linalg.norm(whole.gradient - first.gradient - second.gradient)
    if not np.isfinite(whole.gradient).all():
        return 'its gradient is not finite on a batch: a root or a logarithm at 0, or a division by it.'
    if difference > TOLERANCE * np.linalg.norm(whole.gradient):
        return (
            'the gradients of the halves do not add up to that of the batch: a clip before the reduce, or another '
            'change of the gradient inside the losses.'
        )
    return ''


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= TOLERANCE * max(abs(a), abs(b), 1e-12)


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
