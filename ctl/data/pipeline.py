"""From record numbers to per-replica batches: the `dataset_fn(input_context)` of training and of evaluation.

The order comes from `shards`, window by window; here the blocks of a window are read from their byte offsets, put in
that order, cut into each shard's share of a global batch, joined, and parsed many at a time.
"""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf

from ctl.data import shards
from ctl.data.index import Index
from ctl.experiment import Feature

# Parsing fewer records at once than this costs up to three times as much a record.
PARSE_RECORDS = 256
READ_BUFFER_BYTES = 1 << 18

Batch = dict[str, tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Source:
    """Records on disk and what they mean.

    Attributes:
      index: the files and offsets.
      features: feature name -> `Feature`.
      names: feature name -> its name in these records.
      prepare: the experiment's own work on a parsed per-replica batch.
    """

    index: Index
    features: Mapping[str, Feature]
    names: Mapping[str, str]
    prepare: Callable[[Batch], Batch]


def make_train_dataset_fn(source: Source, layout: shards.Layout, first_step: int) -> Callable:
    """The training input, endless, from global batch `first_step` on.

    Returns:
      dataset_fn(input_context) -> dataset of per-replica batches: every feature [B, ...], `example_weight` float32 [B]
      of ones, `record` int64 [B], where B = input_context.get_per_replica_batch_size(global batch). A pipeline that
      feeds several replicas yields their batches in turn.
    """

    def dataset_fn(input_context: tf.distribute.InputContext) -> tf.data.Dataset:
        batch_size = input_context.get_per_replica_batch_size(layout.global_batch_size)
        mine = layout.pipeline_shards(input_context.input_pipeline_id, input_context.num_input_pipelines)
        position = first_step * layout.share
        # Several steps at a time, so that handing on and parsing small shares costs no more than large ones.
        steps = -(-PARSE_RECORDS // (layout.share * len(mine)))
        streams = [
            _read_shard(source.index, shard, position).rebatch(steps * layout.share, drop_remainder=True)
            for shard in mine
        ]
        records = tf.data.Dataset.zip(tuple(streams)).map(lambda *shares: _join(shares, steps))
        batches = _parse(source, records).rebatch(batch_size, drop_remainder=True)
        return _finish(source, batches, batch_size).apply(
            tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
        )

    return dataset_fn


def make_eval_dataset_fn(source: Source, global_batch_size: int, records: int) -> Callable:
    """The evaluation input: the first `records` records, each exactly once, in the order of the files.

    Every replica gets `eval_steps(...)` batches: the last are padded with zeros and `example_weight` 0.

    Returns:
      dataset_fn(input_context) -> dataset of per-replica batches, as for training.
    """

    def dataset_fn(input_context: tf.distribute.InputContext) -> tf.data.Dataset:
        batch_size = input_context.get_per_replica_batch_size(global_batch_size)
        pipelines = input_context.num_input_pipelines
        replicas = input_context.num_replicas_in_sync // pipelines
        batches = replicas * eval_steps(records, global_batch_size, pipelines)
        start, end = _pipeline_run(records, input_context.input_pipeline_id, pipelines)
        if start == end:  # fewer records than pipelines
            read = tf.data.Dataset.from_tensors(_nothing())
        else:
            block_starts, block_counts = _file_blocks(source.index, start, end)
            shard = shards.Shard(0, block_starts, block_counts, blocks_per_window=8, seed=None)
            read = _read_shard(source.index, shard, 0, shard.windows)
        parsed = _parse(source, read.rebatch(max(batch_size, PARSE_RECORDS // batch_size * batch_size)))
        padding = tf.data.Dataset.from_tensors(_nothing()).map(lambda *nothing: _parse_batch(source, *nothing)).repeat()
        padded = parsed.rebatch(batch_size).concatenate(padding).take(batches).map(lambda b: _pad(b, batch_size))
        return _finish(source, padded, batch_size).apply(tf.data.experimental.assert_cardinality(batches))

    return dataset_fn


def eval_steps(records: int, global_batch_size: int, pipelines: int) -> int:
    """Steps that an evaluation takes: as many as the longest pipeline needs."""
    longest = max(end - start for start, end in (_pipeline_run(records, p, pipelines) for p in range(pipelines)))
    return -(-longest // (global_batch_size // pipelines))


def distribute(strategy: tf.distribute.Strategy, dataset_fn: Callable, per_replica: bool):
    """One input pipeline a worker, which deals batches to its replicas in turn; or one for every replica."""
    options = None
    if per_replica:
        options = tf.distribute.InputOptions(
            experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA,
            experimental_place_dataset_on_device=True,
            experimental_fetch_to_device=False,
        )
    return strategy.distribute_datasets_from_function(dataset_fn, options)


def _pipeline_run(records: int, pipeline: int, pipelines: int) -> tuple[int, int]:
    return records * pipeline // pipelines, records * (pipeline + 1) // pipelines


def _file_blocks(index: Index, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Record numbers [start, end) as blocks of at most 1,024 within one file."""
    runs = [(max(int(a), start), min(int(b), end)) for a, b in zip(index.firsts[:-1], index.firsts[1:], strict=True)]
    return shards.cut_blocks([(a, b) for a, b in runs if a < b], 1024)


def _nothing() -> tuple[tf.Tensor, tf.Tensor]:
    return tf.zeros([0], tf.string), tf.zeros([0], tf.int64)


def _read_shard(index: Index, shard: shards.Shard, position: int, windows: int | None = None) -> tf.data.Dataset:
    """Windows of one shard from record `position` on: (serialized string [n], record number int64 [n]).

    Endless, or the first `windows` windows. Only the window that holds `position` is read again after a resume.
    """
    first, skip = shard.locate(position)
    paths = tf.constant(index.files)

    def plan(number: np.int64):
        window = shard.window(int(number))
        files, within = index.locate(window.starts)
        offsets = np.array([index.offsets[f][i] for f, i in zip(files, within, strict=True)], np.int64)
        leaving = slice(skip if number == first else 0, None)
        return files.astype(np.int64), offsets, window.counts, window.order[leaving], window.records[leaving]

    def read_block(file, offset, count):
        variant = tf.raw_ops.TFRecordDatasetV2(
            filenames=[paths[file]], compression_type='', buffer_size=READ_BUFFER_BYTES, byte_offsets=[offset]
        )
        return tf.data.experimental.from_variant(variant, tf.TensorSpec([], tf.string)).take(count)

    def read_window(number):
        files, offsets, counts, order, records = tf.numpy_function(plan, [number], [tf.int64] * 5)
        for vector in (files, offsets, counts, order, records):
            vector.set_shape([None])
        # The reader with byte offsets works only inside a flat_map (its graph form loses the offsets elsewhere).
        blocks = tf.data.Dataset.from_tensor_slices((files, offsets, counts)).flat_map(read_block)
        whole = blocks.batch(tf.reduce_sum(counts))
        return whole.map(lambda serialized: (tf.gather(serialized, order), records))

    last = tf.int64.max if windows is None else first + windows
    return tf.data.Dataset.range(first, last).flat_map(read_window).prefetch(1)


def _join(shares: tuple, steps: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Shares of `steps` steps from each shard, laid out step after step, and in a step shard after shard.

    The first replica's records come first in a step.
    """

    def interleave(*parts: tf.Tensor) -> tf.Tensor:
        by_shard = tf.reshape(tf.stack(parts), [len(parts), steps, -1])
        return tf.reshape(tf.transpose(by_shard, [1, 0, 2]), [-1])

    serialized, records = zip(*shares, strict=True)
    return interleave(*serialized), interleave(*records)


def _parse(source: Source, records: tf.data.Dataset) -> tf.data.Dataset:
    return records.map(
        lambda serialized, numbers: _parse_batch(source, serialized, numbers), num_parallel_calls=tf.data.AUTOTUNE
    )


def parsing_spec(source: Source) -> dict[str, tf.io.FixedLenFeature]:
    """What tf.io.parse_example is told, by the names in the records. Records hold integers as int64."""
    return {
        source.names[name]: tf.io.FixedLenFeature(feature.shape, {'int32': 'int64'}.get(feature.dtype, feature.dtype))
        for name, feature in source.features.items()
    }


def _parse_batch(source: Source, serialized: tf.Tensor, numbers: tf.Tensor) -> Batch:
    """string [n], int64 [n] -> features [n, ...], `record` [n], `example_weight` [n]."""
    # The names come back in the parser's error messages: `records.explain` reads them.
    names = tf.strings.as_string(numbers)
    parsed = tf.io.parse_example(serialized, parsing_spec(source), example_names=names)
    batch = {}
    for name, feature in source.features.items():
        value = parsed[source.names[name]]
        if feature.below is not None:
            value = _check_ids(value, feature.below, names)
        batch[name] = tf.cast(value, feature.dtype)
    return {**batch, 'record': numbers, 'example_weight': tf.ones_like(numbers, tf.float32)}


def _check_ids(ids: tf.Tensor, below: int, names: tf.Tensor) -> tf.Tensor:
    """Fails the batch on the host, before any device sees it: a GPU's gather would read zeros and say nothing."""
    outside = tf.reduce_any((ids < 0) | (ids >= below), axis=list(range(1, ids.shape.rank)))
    named = 'Name: ' + tf.boolean_mask(names, outside)[:1]
    with tf.control_dependencies([tf.debugging.Assert(~tf.reduce_any(outside), [named])]):
        return tf.identity(ids)


def _pad(batch: Batch, batch_size: int) -> Batch:
    """Adds zeros until every feature has `batch_size` rows; the added rows have `example_weight` 0."""
    missing = batch_size - tf.shape(batch['record'])[0]
    return {
        name: tf.concat([value, tf.zeros(tf.concat([[missing], tf.shape(value)[1:]], 0), value.dtype)], 0)
        for name, value in batch.items()
    }


def _finish(source: Source, batches: tf.data.Dataset, batch_size: int) -> tf.data.Dataset:
    """Fixes the static shapes, so that every replica's step is traced once, and lets the experiment prepare."""

    def prepare(batch: Batch) -> Batch:
        shaped = {name: tf.ensure_shape(value, [batch_size, *value.shape[1:]]) for name, value in batch.items()}
        return source.prepare(shaped)

    return batches.map(prepare, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)
