"""What a run is going to do, said before it does it."""

import itertools
import os
import pathlib
import shutil
from collections.abc import Mapping

import ml_collections
import numpy as np
import rich.box
import rich.console
import rich.markup
import rich.table
import tensorflow as tf

from ctl.data import choices
from ctl.data.index import Index, common_folder
from ctl.data.inputs import Data
from ctl.experiment import Experiment
from ctl.optimizers import decays, make_schedule
from ctl.runtime.checkpoints import Checkpoints
from ctl.runtime.cluster import ALONE, Cluster

# Record numbers shown for each replica and file before the rest is counted.
MOST_NUMBERS = 6
# Input pipelines with a row of their own.
MOST_PIPELINES = 8


def print_plan(console: rich.console.Console, rows: Mapping[str, str]) -> None:
    """One table: what, and its value."""
    table = rich.table.Table(show_header=False, box=rich.box.SIMPLE, pad_edge=False)
    table.add_column(style='bold', no_wrap=True)
    table.add_column(overflow='fold')
    for name, value in rows.items():
        table.add_row(name, rich.markup.escape(value))
    console.print(table)


def device_rows(
    config: ml_collections.ConfigDict, strategy: tf.distribute.Strategy, workers: Cluster
) -> dict[str, str]:
    """Devices, and how the one batch number is divided over them."""
    replicas = strategy.num_replicas_in_sync
    batch, microbatches = config.train.global_batch_size, config.train.microbatches
    plural = 's' if replicas > 1 else ''
    devices = ', '.join(device.rpartition('device:')[2] for device in strategy.extended.worker_devices)
    slices = f' in {microbatches} microbatches of {batch // replicas // microbatches}' if microbatches > 1 else ''
    each = 'an update' if config.train.fresh_batches else 'a step'
    arithmetic = config.train.precision + (', deterministic' if config.train.deterministic else '')
    rows = {}
    if workers is not ALONE:
        count = len(workers.addresses)
        rows['workers'] = (
            f'{count}, of {replicas // count} replicas each: {", ".join(workers.addresses)}; the first writes'
        )
    return {
        **rows,
        'devices': f'{replicas} replica{plural} ({type(strategy).__name__}) on {devices}; {arithmetic}',
        'batch': f'{batch} examples {each} = {replicas} replica{plural} x {batch // replicas}{slices}',
    }


def data_rows(config: ml_collections.ConfigDict, data: Data) -> dict[str, str]:
    """Files and records of each input pipeline, the length of an epoch, and the records of an evaluation."""
    index, layout = data.train, data.layout
    rows = {} if data.default is None else {'data': data.default.about}
    rows['train files'] = f'{len(index.files):,} files, {index.records:,} records: {_short(config.data.train)}'
    compressed = int(index.sequential.sum())
    if compressed:
        rows['compressed'] = (
            f'{compressed:,} of {len(index.files):,} train files: read from their beginning on, so records mix only '
            'within a window, and resuming is slow'
        )
    rows['shards'] = (
        f'{layout.logical_shards} logical shards, {layout.share} records of each in a global batch; {data.why}'
    )
    rows['shuffle'] = _shuffle_text(config, data)
    for pipeline in range(min(data.pipelines, MOST_PIPELINES)):
        mine = layout.part(pipeline, data.pipelines).shards
        records = sum(shard.records for shard in mine)
        files = len({int(file) for shard in mine for file in index.locate(shard.starts)[0]})
        rows[f'pipeline {pipeline} of {data.pipelines}'] = f'{files} files, {records:,} records'
    if data.pipelines > MOST_PIPELINES:
        rows['more pipelines'] = f'{data.pipelines - MOST_PIPELINES}, with shares as equal'
    if layout.times_read(data.pipelines) > 1:
        rows['read again'] = read_again_text(data)
    epoch = index.records / layout.global_batch_size / layout.batches_per_step
    rows['epoch'] = f'{epoch:,.1f} steps; {config.train.steps:,} steps are {config.train.steps / epoch:.2f} epochs'
    part = (
        ''
        if data.eval_records == data.evaluation.records
        else f'a sample of {data.eval_records:,}, drawn by train.seed, of '
    )
    rows['eval files'] = (
        f'{len(data.evaluation.files):,} files, {part}{data.evaluation.records:,} records: {_short(config.data.eval)}'
    )
    if data.bad.skip:
        rows['bad records'] = f'{data.bad}; the run stops above {config.data.max_bad_records}'
    return rows


def read_again_text(data: Data) -> str:
    """Where pipelines do not divide the shards: what that costs."""
    shards, times = data.layout.logical_shards, data.layout.times_read(data.pipelines)
    return (
        f'{times - 1:.0%} of the records: {data.pipelines} pipelines do not divide {shards} shards, and one that '
        'several need is read by each, which takes its part of it'
    )


def _shuffle_text(config: ml_collections.ConfigDict, data: Data) -> str:
    layout = data.layout
    bounded = layout.window_records < config.data.window_records
    shards = layout.logical_shards * layout.times_read(data.pipelines)
    held = choices.WINDOWS_HELD * shards * layout.window_records * int(data.train.sizes.mean())
    return (
        f'windows of {layout.window_records:,} records in blocks of {layout.block_records}; '
        f'those of all shards take up to {held / 2**20:,.0f} MiB'
        + (f' (fewer records than {config.data.window_records:,}: data.window_mebibytes)' if bounded else '')
    )


def _short(path: str) -> str:
    """The path with the home folder as ~, for display."""
    home = os.path.expanduser('~') + os.sep
    return f'~{os.sep}{path.removeprefix(home)}' if path.startswith(home) else path


def model_rows(experiment: Experiment, train: ml_collections.ConfigDict) -> dict[str, str]:
    """Parameters, the updates of a step, the schedule of each objective, and what decays; `train` is the section."""
    parameters = [f'{name} {model.count_params():,}' for name, model in experiment.models.items()]
    rows, steps = {'parameters': ', '.join(parameters)}, train.steps
    rounds = experiment.rounds(train.update_order)
    if sum(map(len, rounds)) > 1:
        text = ', then '.join(
            f'{" with ".join(names)}{f" x {n}" if (n := len(list(same))) > 1 else ""}'
            for names, same in itertools.groupby([[o.name for o in objectives] for objectives in rounds])
        )
        rows['a step'] = f'{text}; {"a global batch for each update" if train.fresh_batches else "all on one batch"}'
    for objective in experiment.objectives:
        section, variables = objective.optimizer, objective.variables
        label = 'optimizer' if len(experiment.objectives) == 1 else objective.name
        rows[label] = (
            f'{section.name}, learning rate {section.learning_rate:g} after {section.warmup_steps} steps of warm-up, '
            f'then {section.schedule} to step {steps}; clip {section.clip_norm:g}'
        )
        if section.warmup_steps >= steps:
            rows[f'WARNING: {label}'] = (
                f'{section.warmup_steps} steps of warm-up are not fewer than the {steps} of the run: it never comes to '
                f'its learning rate; lower warmup_steps, or raise train.steps'
            )
        if section.weight_decay:
            decaying = [v for v in variables if decays(v)]
            vectors = [v.path.rpartition('/')[2] for v in variables if not decays(v)]
            weights = sum(int(np.prod(v.shape)) for v in decaying)
            rows[f'{label} decay'] = (
                f'{section.weight_decay:g} on {len(decaying)} matrices ({weights:,} weights); '
                f'none on {len(vectors)} vectors ({", ".join(sorted(set(vectors)))})'
            )
    return rows


def schedule_rows(experiment: Experiment, stored: dict | None, step: int, steps: int) -> dict[str, str]:
    """How the learning rate at `step` is another than it would have been, for schedules end at `train.steps`.

    Args:
      experiment: with the settings of its optimizers.
      stored: config.json of the start before; None where there was none.
      step: from which the run goes on.
      steps: in the whole run.
    """
    rows, before = {}, (stored or {}).get('train', {}).get('steps', steps)
    for objective in experiment.objectives if step else ():
        section, call = objective.optimizer, step * objective.updates
        was, now = (float(make_schedule(section, last, objective.updates)(call)) for last in (before, steps))
        if not np.isclose(was, now, rtol=1e-6, atol=0):
            label = 'learning rate' if len(experiment.objectives) == 1 else f'{objective.name} rate'
            rows[label] = (
                f'{now:.4g} in the next step, and not {was:.4g}: '
                f'{section.schedule} to step {steps:,}, which was {before:,}'
            )
    return rows


def run_rows(
    workdir: pathlib.Path, checkpoints: Checkpoints, step: int, steps: int, started_from: str | None
) -> dict[str, str]:
    """Where the run lives, where it goes on, or whose weights it starts with, and whether its disk has room."""
    rows = {'workdir': str(workdir), 'resumed': 'nothing; starts at step 0'}
    free, needed = _free_bytes(workdir), checkpoints.bytes_needed
    if free < needed:
        rows['WARNING'] = (
            f'the checkpoints that checkpoint.keep keeps need {needed / 2**20:,.0f} MiB, and {free / 2**20:,.0f} MiB '
            'are free there'
        )
    if checkpoints.newest:
        rows['resumed'] = f'from {os.path.relpath(checkpoints.newest, workdir)}, at step {step} of {steps}'
    if started_from:
        rows['warm start'] = f'weights of {_short(started_from)}; step 0 and fresh optimizer slots: not a resumed run'
    return rows


def _free_bytes(path: pathlib.Path) -> int:
    """On the disk where a path is, or will be."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def feed_text(data: Data, step: int, replicas: int, most: int | None = MOST_NUMBERS) -> str:
    """Which records each replica is fed in `step`, a line a replica: file, and the first `most` numbers within it."""
    lines = []
    for batch, name in enumerate(data.batch_names):
        update = f', update {batch} ({name}),' if name else ''
        where = _short(str(common_folder(data.train.files)))
        lines.append(f'Step {step}{update} feeds (record numbers in the files of {where}):')
        for replica, records in enumerate(data.layout.replica_records(step, replicas, data.pipelines, batch)):
            lines.append(
                f'  replica {replica} (pipeline {replica * data.pipelines // replicas}): '
                + _records_text(data.train, records, most)
            )
    return '\n'.join(lines)


def _records_text(index: Index, records: np.ndarray, most: int | None) -> str:
    parts = []
    for file, group in itertools.groupby(sorted(named_records(index, records)), lambda record: record[0]):
        numbers = [str(number) for _, number in group]
        more = f' +{len(numbers) - most}' if most and len(numbers) > most else ''
        parts.append(f'{file}: {" ".join(numbers[:most])}{more}')
    return ', '.join(parts)


def named_records(index: Index, records: np.ndarray) -> list[tuple[str, int]]:
    """(file, number within it) of each record, files by their paths below the folder that holds all."""
    folder = common_folder(index.files)
    files, numbers = index.locate(records)
    names = {file: os.path.relpath(os.path.abspath(index.files[file]), folder) for file in np.unique(files)}
    return [(names[file], int(number)) for file, number in zip(files, numbers, strict=True)]
