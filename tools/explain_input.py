"""Says which records every replica reads in every step, and proves it on request.

    python -m tools.explain_input --experiment=bert_mlm --config.devices.replicas=4 --steps=0:2 --verify

Takes the flags of ctl.train. With the --workdir of a run it takes the config of that run, and needs no other flag;
--config flags are then as for a later start of it. `--verify` runs the real pipeline for those steps and compares what
comes out with what was said: any difference ends with exit code 3.
"""

import itertools
import json
import sys
from collections.abc import Iterator

import numpy as np
from absl import flags as absl_flags

from ctl import flags
from ctl.command_line import say_aside
from ctl.errors import GuardError, UserError
from ctl.experiment import make_experiment

Fed = list[list[int]]  # record numbers of each replica in one step


def _define(values: absl_flags.FlagValues) -> None:
    absl_flags.DEFINE_string('steps', '0:1', 'the steps A:B to explain, B not among them', flag_values=values)
    absl_flags.DEFINE_bool(
        'json', False, 'one JSON object a line, for each step, update that reads, and replica', flag_values=values
    )
    absl_flags.DEFINE_bool('verify', False, 'read those steps with the real pipeline and compare', flag_values=values)
    absl_flags.DEFINE_integer(
        'workers', 1, 'simulate so many machines of devices.replicas each', lower_bound=1, flag_values=values
    )


PROGRAM = flags.ExperimentProgram('tools.explain_input', __doc__, _define, only_reads=True)


def main(argv: list[str]) -> int:
    """Runs one command line, without the program's name, and returns the exit code."""
    return PROGRAM.run(argv, explain)


def explain(request: flags.ExperimentRequest) -> None:
    """Does what is asked for; raises UserError and GuardError."""
    from ctl.data.inputs import choose_data, find_data
    from ctl.runtime import devices, plan

    steps, workers = _steps(request.own['steps']), request.own['workers']
    config = request.config
    strategy = devices.make_strategy(devices.on_cpus(config.devices))
    replicas = workers * strategy.num_replicas_in_sync
    default_data = choose_data(request.name, request.module, config, say_aside, request.stored)
    data = find_data(config, replicas, default_data, say_aside, workers=workers)
    with strategy.scope():
        experiment = make_experiment(request.module, config)
    data = data.for_batches(experiment.update_names(config.train))

    for step in steps:
        if request.own['json']:
            _print_json(data, step, replicas)
        else:
            print(plan.feed_text(data, step, replicas))
    if not request.own['json']:
        print(_coverage(data))
    if request.own['verify']:
        _verify(experiment, data, strategy, replicas, steps, workers)
        say_aside(f'verified: the pipeline read exactly this in steps {steps.start} to {steps.stop - 1}.')


def _print_json(data, step: int, replicas: int) -> None:
    """A line for each replica, of each global batch of a step."""
    from ctl.runtime import plan

    for batch, name in enumerate(data.batch_names):
        update = {'update': batch, 'objective': name} if name else {}
        for replica, records in enumerate(data.layout.replica_records(step, replicas, data.pipelines, batch)):
            named = [list(record) for record in plan.named_records(data.train, records)]
            pipeline = replica * data.pipelines // replicas
            print(json.dumps({'step': step, **update, 'replica': replica, 'pipeline': pipeline, 'records': named}))


def _steps(text: str) -> range:
    start, colon, stop = text.partition(':')
    if not (colon and start.isdigit() and stop.isdigit() and int(start) < int(stop)):
        raise UserError(f'--steps={text}: expected A:B with A below B, like 0:10.')
    return range(int(start), int(stop))


def _coverage(data) -> str:
    """What one epoch of every shard covers, counted and not argued."""
    from ctl.runtime import plan

    index, layout = data.train, data.layout
    read = np.concatenate([shard.take(0, shard.records) for shard in layout.shards])
    distinct = len(np.unique(read))
    lines = [f'{layout.logical_shards} logical shards; {data.why}.']
    for pipeline in range(data.pipelines):
        mine, start, stop = layout.part(pipeline, data.pipelines)
        files = sorted({int(file) for shard in mine for file in index.locate(shard.starts)[0]})
        records, rows = sum(shard.records for shard in mine), len(mine) * layout.share
        part = (
            '' if stop - start == rows else f'; {stop - start} of their {rows} rows in a global batch, from {start} on'
        )
        lines.append(
            f'  pipeline {pipeline} of {data.pipelines}: shards {" ".join(str(shard.number) for shard in mine)}; '
            f'{len(files)} files, {records:,} records ({records / index.records:.1%}){part}'
        )
    if layout.times_read(data.pipelines) > 1:
        lines.append(f'Read again: {plan.read_again_text(data)}.')
    complete = 'complete' if distinct == index.records else f'{index.records - distinct:,} records missing'
    disjoint = 'disjoint' if distinct == len(read) else f'{len(read) - distinct:,} records twice'
    lines.append(f'An epoch reads {len(read):,} of {index.records:,} records: {complete}, {disjoint}.')
    return '\n'.join(lines)


def _verify(experiment, data, strategy, replicas: int, steps: range, workers: int) -> None:
    """Compares the arithmetic with the record numbers that the real pipeline carries beside the features.

    Raises:
      GuardError: at the first step and replica that differ.
    """
    from ctl.data import pipeline, records

    source = records.make_source(data.train, experiment, data.bad)
    dataset_fn = pipeline.make_train_dataset_fn(source, data.layout, steps.start)
    if workers == 1:
        fed = _read_distributed(strategy, pipeline.distribute(strategy, dataset_fn, data.pipelines > 1))
    else:
        fed = _read_simulated(dataset_fn, data.pipelines, replicas)
    for step, batch in itertools.product(steps, range(len(data.batch_names))):
        with records.explained(source):
            read_now = next(fed)
        said = [each.tolist() for each in data.layout.replica_records(step, replicas, data.pipelines, batch)]
        for replica, (read, expected) in enumerate(zip(read_now, said, strict=True)):
            if read != expected:
                first = next(i for i in range(len(expected)) if read[i] != expected[i])
                raise GuardError(
                    f'step {step}, replica {replica}, place {first}: the pipeline read {data.train.name(read[first])}, '
                    f'not {data.train.name(expected[first])}.'
                )


def _read_distributed(strategy, dataset) -> Iterator[Fed]:
    """What strategy.run would be given, step after step."""
    for batch in dataset:
        yield [each.numpy().tolist() for each in strategy.experimental_local_results(batch['record'])]


def _read_simulated(dataset_fn, pipelines: int, replicas: int) -> Iterator[Fed]:
    """The same from `dataset_fn` alone, called as each of the workers would call it."""
    import tensorflow as tf

    contexts = [tf.distribute.InputContext(pipelines, pipeline, replicas) for pipeline in range(pipelines)]
    iterators = [iter(dataset_fn(context)) for context in contexts]
    while True:
        yield [
            next(iterator)['record'].numpy().tolist() for iterator in iterators for _ in range(replicas // pipelines)
        ]


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
