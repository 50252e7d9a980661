"""Measures the input pipeline against a raw read and a TF1-style pipeline, in turn, on the same files.

    python -m tools.bench_input --experiment=bert_mlm

Takes the flags of ctl.train, or the --workdir of a run. Each round runs every pipeline once, for some seconds, after a
warm-up; the medians over the rounds are printed, and the ratio of ours to the others. CPU time is of the whole process.
Then, also in turn: the time to the first batch from an early and from a late step, and the speed of indexing; and the
peak of the process's memory over 10 epochs. Quote ratios.
"""

import json
import statistics
import sys
import time

from absl import flags as absl_flags

from ctl import flags
from ctl.command_line import say_aside
from ctl.experiment import make_experiment

EARLY_AND_LATE = (10, 10_000_000)


def _define(values: absl_flags.FlagValues) -> None:
    absl_flags.DEFINE_integer('rounds', 5, 'runs of each pipeline, in turn', lower_bound=1, flag_values=values)
    absl_flags.DEFINE_float('seconds', 2.0, 'length of one run', lower_bound=0.01, flag_values=values)
    absl_flags.DEFINE_bool('json', False, 'print one JSON object', flag_values=values)


PROGRAM = flags.ExperimentProgram('tools.bench_input', __doc__, _define, only_reads=True)


def main(argv: list[str]) -> int:
    """Runs one command line, without the program's name, and returns the exit code."""
    return PROGRAM.run(argv, bench)


def bench(request: flags.ExperimentRequest) -> None:
    """Does what is asked for; raises UserError and GuardError."""
    from ctl.data import records
    from ctl.data.inputs import choose_data, find_data
    from ctl.runtime import devices

    config = request.config
    devices.make_strategy(devices.on_cpus(config.devices))
    default_data = choose_data(request.name, request.module, config, say_aside, request.stored)
    experiment = make_experiment(request.module, config)
    data = find_data(config.copy_and_resolve_references(), 1, default_data, say_aside)
    source = records.make_source(data.train, experiment, data.bad)
    pipelines = {'raw read': (1024, _raw_read(source)), 'TF1 style, batch 32': (32, _one_by_one(source, 32))}
    for batch_size in (32, 256):
        pipelines[f'ctl, batch {batch_size}'] = (batch_size, _ours(source, config, batch_size))

    rates, costs = {name: [] for name in pipelines}, {name: [] for name in pipelines}
    for _ in range(request.own['rounds']):
        for name, (batch_size, dataset) in pipelines.items():
            rate, cost = _time(dataset, batch_size, request.own['seconds'])
            rates[name].append(rate)
            costs[name].append(cost)
    result = {
        'pipelines': _rows(rates, costs),
        'first_batch': _first_batch(source, config, request.own['rounds']),
        'indexing': _indexing(source, request.own['rounds']),
        'memory': _memory(source, config),
    }
    print(json.dumps(result) if request.own['json'] else _as_text(result))


def _ours(source, config, batch_size: int, first_step: int = 0):
    """The training pipeline of one replica, shuffling as configured, from a step on."""
    import tensorflow as tf

    from ctl.data import choices, pipeline
    from ctl.data.inputs import make_layout

    config = config.copy_and_resolve_references()
    config.train.global_batch_size = batch_size
    compressed = bool(source.index.sequential.any())
    logical_shards, shard_by, _ = choices.choose_shards(source.index.counts, batch_size, compressed=compressed)
    layout = make_layout(source.index, config, logical_shards, shard_by)
    return pipeline.make_train_dataset_fn(source, layout, first_step)(tf.distribute.InputContext())


def _raw_read(source):
    """The files from end to end, endlessly, parsing nothing."""
    import tensorflow as tf

    return tf.data.TFRecordDataset(source.index.files).repeat().batch(1024).prefetch(tf.data.AUTOTUNE)


def _one_by_one(source, batch_size: int):
    """As a TF1 input_fn for an Estimator was written: interleave, a small shuffle, parse and cast for every record."""
    import tensorflow as tf

    from ctl.data import pipeline
    from ctl.data.records import decode_image

    def parse(serialized):
        parsed = tf.io.parse_single_example(serialized, pipeline.parsing_spec(source))
        return {
            name: decode_image(parsed[source.names[name]], f.shape)
            if f.dtype == 'image'
            else tf.cast(parsed[source.names[name]], f.dtype)
            for name, f in source.features.items()
        }

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


def _rows(rates: dict[str, list[float]], costs: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Per pipeline the medians, and the median, least and largest of the rounds' ratios to the TF1 style."""
    base = next(values for name, values in rates.items() if name.startswith('TF1'))
    rows = {}
    for name, values in rates.items():
        ratios = [a / b for a, b in zip(values, base, strict=True)]  # the two of a round ran one after the other
        rows[name] = {
            'records_per_s': statistics.median(values),
            'cpu_us_per_record': statistics.median(costs[name]),
            'times_tf1': statistics.median(ratios),
            'least': min(ratios),
            'most': max(ratios),
        }
    return rows


def _first_batch(source, config, rounds: int) -> dict[str, float]:
    """Seconds from no pipeline to its first batch, from an early step and from a late one, by step."""
    seconds = {step: [] for step in EARLY_AND_LATE}
    for _ in range(rounds):
        for step, taken in seconds.items():
            began = time.perf_counter()
            next(iter(_ours(source, config, 32, step)))
            taken.append(time.perf_counter() - began)
    return {f'step {step:,}': statistics.median(taken) for step, taken in seconds.items()}


def _indexing(source, rounds: int) -> dict[str, float]:
    """Records a second of reading the files and of indexing them, and the median of the rounds' ratios."""
    import tensorflow as tf

    from ctl.data.index import load_index

    index, read, indexed = source.index, [], []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in tf.data.TFRecordDataset(index.files).batch(1024).prefetch(tf.data.AUTOTUNE):
            pass
        read.append(index.records / (time.perf_counter() - began))
        began = time.perf_counter()
        load_index(index.files, fresh=True)
        indexed.append(index.records / (time.perf_counter() - began))
    ratio = statistics.median(b / a for a, b in zip(read, indexed, strict=True))
    return {
        'read_records_per_s': statistics.median(read),
        'records_per_s': statistics.median(indexed),
        'times_read': ratio,
    }


def _memory(source, config) -> dict[str, float]:
    """The peak memory of the process in MiB, after 1 and after 10 more epochs of ours at batch 256."""
    import resource  # which Windows does not have

    batches = iter(_ours(source, config, 256))
    peaks = {}
    for epoch in range(1, 11):
        for _ in range(-(-source.index.records // 256)):
            next(batches)
        if epoch in (1, 10):
            peaks[f'after {epoch} epochs'] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return peaks


def _as_text(result: dict) -> str:
    lines = [f'{"":<22}{"records/s":>12}{"CPU us/record":>15}{"x TF1 style":>13}{"(min, max)":>18}']
    for name, row in result['pipelines'].items():
        spread = f'({row["least"]:.1f}, {row["most"]:.1f})'
        rate, cost, ratio = row['records_per_s'], row['cpu_us_per_record'], row['times_tf1']
        lines.append(f'{name:<22}{rate:>12,.0f}{cost:>15.1f}{ratio:>13.1f}{spread:>18}')
    first, indexing = result['first_batch'], result['indexing']
    lines.append('first batch: ' + ', '.join(f'from {step} in {seconds:.3f} s' for step, seconds in first.items()))
    lines.append(f'indexing: {indexing["records_per_s"]:,.0f} records/s, {indexing["times_read"]:.2f} times a raw read')
    peaks = ', '.join(f'{when} {peak:,.0f} MiB' for when, peak in result['memory'].items())
    lines.append(f'peak memory of the process: {peaks}')
    return '\n'.join(lines)


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
