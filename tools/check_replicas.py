"""Does an experiment make the same update on any number of replicas? Runs it on each and compares, dropout off.

    python -m tools.check_replicas --experiment=bert_mlm [--replicas=1,2,4] [--microbatches=1,2] [--steps=5]

Every topology starts from the same weights and reads the same records. What differs from the first by more than the
tolerance, relative to the norm, ends with exit code 3. The losses are also taken apart on one batch, to name the cause:
sums and weights over two halves of a batch must add up to those over the whole, and so must the gradients.
"""

import itertools
import sys

import numpy as np
from absl import flags as absl_flags

from ctl import config as config_lib
from ctl import flags
from ctl.command_line import say_aside
from ctl.errors import GuardError, UserError

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


def check(request: flags.Request) -> None:
    """Does what is asked for; raises UserError and GuardError."""
    from ctl.runtime import devices

    topologies = list(itertools.product(_numbers(request, 'replicas'), _numbers(request, 'microbatches')))
    most = max(replicas for replicas, _ in topologies)
    config = request.config
    for key in config_lib.flatten(config):
        if key.rpartition('.')[2].endswith('dropout'):
            config_lib.set_value(config, key, 0.0)
        if key.rpartition('.')[2] == 'noise' and 'record' in getattr(config_lib.setting(key), 'choices', ()):
            config_lib.set_value(config, key, 'record')
    config.devices.replicas, config.devices.strategy = most, 'auto'
    devices.make_strategy(config.devices)  # the virtual devices, before anything else
    source, layout = _read_data(request, most)

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


def _numbers(request: flags.Request, name: str) -> list[int]:
    words = request.own[name]
    if not words or not all(word.isdigit() and int(word) for word in words):
        raise UserError(f'--{name}={",".join(words)}: expected whole numbers above 0, like 1,2,4.')
    return [int(word) for word in words]


def _read_data(request: flags.Request, most: int):
    """The training records, and a layout whose shards every number of replicas up to `most` can carry."""
    from ctl.data import choices, records
    from ctl.data.inputs import choose_data, find_data

    config = request.config
    unit = int(np.lcm.reduce(_numbers(request, 'replicas')))
    for microbatches in _numbers(request, 'microbatches'):
        choices.check_batch(config.train.global_batch_size, unit, microbatches)
    default_data = choose_data(request.name, request.module, config, say_aside)
    data = find_data(config, unit, default_data, say_aside)
    experiment = request.module.make_experiment(config)
    return records.make_source(data.train, experiment, data.bad), data.layout


def _make(request: flags.Request):
    """The experiment and its optimizers, with the same initial weights every time. In strategy.scope()."""
    import keras

    from ctl.optimizers import make_optimizer

    config = request.config
    keras.utils.set_random_seed(config.train.seed)
    experiment = request.module.make_experiment(config)
    optimizers = {
        o.name: make_optimizer(o.optimizer, config.train.steps, o.variables, o.updates) for o in experiment.objectives
    }
    return experiment, optimizers


def _train(
    request: flags.Request, source, layout, replicas: int, microbatches: int
) -> dict[str, dict[str, np.ndarray]]:
    """What a topology comes to: losses by step, gradients of the first step and weights after the last, by name."""
    import keras
    import tensorflow as tf

    from ctl.data import pipeline
    from ctl.runtime import devices
    from ctl.update import Training, make_updates

    config = request.config.copy_and_resolve_references()
    config.devices.replicas = replicas
    strategy = devices.make_strategy(config.devices)
    keras.utils.clear_session()
    devices.set_precision(config.train.precision)
    with strategy.scope():
        experiment, optimizers = _make(request)
    dataset = pipeline.distribute(strategy, pipeline.make_train_dataset_fn(source, layout, 0), per_replica=False)

    names = experiment.update_names(config.train)
    training = Training(experiment, optimizers, config.train.seed, microbatches, config.train.update_order)

    def replica_step(batches, step):
        """The sum of all updates' objectives, and the last gradient of each variable by path."""
        outcomes = make_updates(training, batches, step)
        gradients = {
            v.path: gradient
            for objective, outcome in outcomes
            for v, gradient in zip(objective.variables, outcome.gradients, strict=True)
        }
        return tf.add_n([outcome.value for _, outcome in outcomes]), gradients

    @tf.function
    def step_of(batches, step):
        loss, gradients = strategy.run(replica_step, args=(batches, step))
        local = strategy.experimental_local_results
        return local(loss)[0], {name: local(gradient)[0] for name, gradient in gradients.items()}

    losses, first_gradients, read = {}, {}, iter(dataset)
    for step in range(request.own['steps']):
        loss, gradients = step_of([next(read) for _ in names], tf.constant(step, tf.int64))
        losses[f'step {step}'] = loss.numpy()
        first_gradients = first_gradients or {name: gradient.numpy() for name, gradient in gradients.items()}
    weights = {v.path: v.numpy() for model in experiment.models.values() for v in model.variables}
    return {'losses': losses, 'gradients': first_gradients, 'weights': weights}


def _differences(expected: dict, found: dict) -> dict[str, dict[str, float]]:
    """Norm of the difference over the norm of the expected, for every part of every kind."""

    def difference(a: np.ndarray, b: np.ndarray, scale: float) -> float:
        return float(np.linalg.norm(np.asarray(a, np.float64) - b) / scale) if scale else 0.0

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


def _causes(request: flags.Request, source, layout) -> list[str]:
    """What in the losses makes them depend on how a batch is cut, in words."""
    import keras
    import tensorflow as tf

    from ctl import seeds
    from ctl.data import pipeline
    from ctl.update import run_losses

    keras.utils.clear_session()
    experiment, _ = _make(request)
    batch = next(iter(pipeline.make_train_dataset_fn(source, layout, 0)(tf.distribute.InputContext())))
    batch['example_seed'] = seeds.of_records(tf.zeros([2], tf.int32), batch['record'])
    half = layout.global_batch_size // 2
    halves = [{k: v[:half] for k, v in batch.items()}, {k: v[half:] for k, v in batch.items()}]
    seed, causes = tf.constant([0, 0]), []

    def measure(objective, batch) -> dict[str, tuple[float, float, float, np.ndarray]]:
        """Per loss: sum, weight, and the gradient of the sum, end to end."""
        variables, found = [v.value for v in objective.variables], {}
        with tf.GradientTape(persistent=True) as tape:
            losses, _, _ = run_losses(objective, batch, seed)
        for name, pair in losses.items():
            gradients = tape.gradient(pair.sum, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)
            flat = np.concatenate([tf.convert_to_tensor(g).numpy().ravel() for g in gradients])
            found[name] = float(pair.sum), float(pair.weight), flat
        return found

    for objective in experiment.objectives:
        whole, again = measure(objective, batch), measure(objective, batch)
        parts = [measure(objective, each) for each in halves]
        for name, (total, weight, gradient) in whole.items():
            where = f'objective {objective.name}, {name}'
            sums = [part[name][0] for part in parts]
            weights = [part[name][1] for part in parts]
            gradients = sum(part[name][2] for part in parts)
            if not _close(total, again[name][0]):
                causes.append(
                    f'{where}: twice on the same batch, it is {total:.6g} and {again[name][0]:.6g}: random numbers '
                    'that do not come from `seed`.'
                )
            elif not _close(weight, sum(weights)):
                causes.append(
                    f'{where}: its weight is {weight:.6g} on a batch, and {weights[0]:.6g} + {weights[1]:.6g} on its '
                    'halves: a mean taken inside the replica. Return the sum, and the weight to divide it by.'
                )
            elif not _close(total, sum(sums)):
                causes.append(
                    f'{where}: its sum is {total:.6g} on a batch, and {sums[0]:.6g} + {sums[1]:.6g} on its halves: '
                    'batch statistics, a mean taken inside the replica, or something else that mixes examples.'
                )
            elif np.linalg.norm(gradient - gradients) > TOLERANCE * np.linalg.norm(gradient):
                causes.append(
                    f'{where}: the gradients of the halves do not add up to that of the batch: a clip before the '
                    'reduce, or another change of the gradient inside the losses.'
                )
    return causes


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= TOLERANCE * max(abs(a), abs(b), 1e-12)


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
