"""Measures the input pipeline against a raw read and a TF1-style pipeline, in turn, on the same files.

    python -m tools.bench_input --experiment=bert_mlm

Takes the flags of ctl.train. Each round runs every pipeline once, for some seconds, after a warm-up; the medians over
the rounds are printed, and the ratio of ours to the others. CPU time is of the whole process. Quote ratios.
"""

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable

from absl import flags as absl_flags

from ctl import flags


def _define(values: absl_flags.FlagValues) -> None:
    absl_flags.DEFINE_integer('rounds', 5, 'runs of each pipeline, in turn', lower_bound=1, flag_values=values)
    absl_flags.DEFINE_float('seconds', 2.0, 'length of one run', lower_bound=0.01, flag_values=values)
    absl_flags.DEFINE_bool('json', False, 'print one JSON object', flag_values=values)


PROGRAM = flags.Program('tools.bench_input', _define)


def main(argv: list[str]) -> int:
    """Runs one command line, without the program's name, and returns the exit code."""
    return PROGRAM.run(argv, bench)


def bench(request: flags.Request) -> None:
    """Does what is asked for; raises UserError and GuardError."""
    from ctl.data import records
    from ctl.data.bad_records import BadRecords
    from ctl.data.inputs import choose_data, find_data
    from ctl.runtime import devices

    config = request.config
    devices.make_strategy(config.devices)

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    default_data = choose_data(request.name, request.module, config, say)
    experiment = request.module.make_experiment(config)
    bad = BadRecords(config.data, say)
    index = find_data(config.copy_and_resolve_references(), 1, default_data, bad).train
    source = records.make_source(index, experiment, bad)
    pipelines = {'raw read': (1024, _raw_read(source)), 'TF1 style, batch 32': (32, _one_by_one(source, 32))}
    for batch_size in (32, 256):
        pipelines[f'ctl, batch {batch_size}'] = (batch_size, _ours(source, config, batch_size))

    rates, costs = {name: [] for name in pipelines}, {name: [] for name in pipelines}
    for _ in range(request.own['rounds']):
        for name, (batch_size, dataset) in pipelines.items():
            rate, cost = _time(dataset, batch_size, request.own['seconds'])
            rates[name].append(rate)
            costs[name].append(cost)
    _print_result(rates, costs, request.own['json'])


def _ours(source, config, batch_size: int):
    """The training pipeline of one replica, shuffling as configured."""
    import tensorflow as tf

    from ctl.data import pipeline, shards
    from ctl.data.inputs import make_layout

    config = config.copy_and_resolve_references()
    config.train.global_batch_size = batch_size
    logical_shards, shard_by, _ = shards.choose_shards(source.index.counts, batch_size, 1)
    layout = make_layout(source.index, config, logical_shards, shard_by)
    return pipeline.make_train_dataset_fn(source, layout, 0)(tf.distribute.InputContext())


def _raw_read(source):
    """The files from end to end, endlessly, parsing nothing."""
    import tensorflow as tf

    return tf.data.TFRecordDataset(source.index.files).repeat().batch(1024).prefetch(tf.data.AUTOTUNE)


def _one_by_one(source, batch_size: int):
    """As a TF1 input_fn for an Estimator was written: interleave, a small shuffle, parse and cast for every record."""
    import tensorflow as tf

    from ctl.data import pipeline

    def parse(serialized):
        parsed = tf.io.parse_single_example(serialized, pipeline.parsing_spec(source))
        return {name: tf.cast(parsed[source.names[name]], f.dtype) for name, f in source.features.items()}

    files = tf.data.Dataset.from_tensor_slices(list(source.index.files)).shuffle(len(source.index.files)).repeat()
    records = files.interleave(
        tf.data.TFRecordDataset, cycle_length=4, num_parallel_calls=tf.data.AUTOTUNE, deterministic=False
    )
    parsed = records.shuffle(100).map(parse, num_parallel_calls=tf.data.AUTOTUNE)
    return parsed.batch(batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


def _time(dataset, batch_size: int, seconds: float) -> tuple[float, float]:
    """Records a second, and CPU microseconds a record, of one run after a warm-up."""
    iterator = iter(dataset)
    for _ in range(max(3, 2048 // batch_size)):
        next(iterator)
    batches, wall, cpu = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - wall < seconds:
        next(iterator)
        batches += 1
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return batches * batch_size / wall, cpu / (batches * batch_size) * 1e6


def _print_result(rates: dict[str, list[float]], costs: dict[str, list[float]], as_json: bool) -> None:
    rate = {name: statistics.median(values) for name, values in rates.items()}
    cost = {name: statistics.median(values) for name, values in costs.items()}
    base = next(name for name in rate if name.startswith('TF1'))

    def ratio(name: str, of: Callable[[list[float], list[float]], float] = statistics.median) -> float:
        """The median of the rounds' ratios: the two of a round ran one after the other."""
        return of([a / b for a, b in zip(rates[name], rates[base], strict=True)])

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if as_json:
        rows = {n: {'records_per_s': rate[n], 'cpu_us_per_record': cost[n], 'times_tf1': ratio(n)} for n in rate}
        print(json.dumps({'pipelines': rows, 'peak_memory_mib': peak}))
        return
    print(f'{"":<22}{"records/s":>12}{"CPU us/record":>15}{"x TF1 style":>13}{"(min, max)":>18}')
    for name in rate:
        spread = f'({ratio(name, min):.1f}, {ratio(name, max):.1f})'
        print(f'{name:<22}{rate[name]:>12,.0f}{cost[name]:>15.1f}{ratio(name):>13.1f}{spread:>18}')
    print(f'peak memory of the process: {peak:,.0f} MiB')


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
