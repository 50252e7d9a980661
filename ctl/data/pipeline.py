"""From record numbers to per-replica batches: the `dataset_fn(input_context)` of training and of evaluation.

The order comes from `shards`, window by window, and `reading` reads it. Here each shard's share of a global batch is
cut, joined with the others', and parsed many at a time.
"""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from ctl.data import shards
from ctl.data.index import Index
from ctl.data.reading import read_endlessly, read_once
from ctl.data.records import INT32, Source, check_record, decode_image, make_blank
from ctl.errors import UserError
from ctl.experiment import BATCH_NAMES, Batch, call_prepare, unchanged
from ctl.seeds import of_readings

# Small records cost up to three times as much when few are parsed at once; large ones are parsed alone.
PARSE_RECORDS, PARSE_BYTES = 512, 8 << 20

# What a batch that is to be prepared has besides features: no name that a feature may have.
SEEDS = 'seeds of prepare'


def make_train_dataset_fn(source: Source, layout: shards.Layout, first_step: int) -> Callable:
    """The training input, endless, from the first global batch of `first_step` on.

    Returns:
      dataset_fn(input_context) -> dataset of per-replica batches: every feature [B, ...], `example_weight` float32 [B]
      of ones (0 for a wrong record that is skipped), `record` int64 [B], where
      B = input_context.get_per_replica_batch_size(global batch). A pipeline that feeds several replicas yields their
      batches in turn.
    """

    def dataset_fn(input_context: tf.distribute.InputContext) -> tf.data.Dataset:
        batch_size = input_context.get_per_replica_batch_size(layout.global_batch_size)
        part = layout.part(input_context.input_pipeline_id, input_context.num_input_pipelines)
        position = layout.position(first_step)
        # Several steps at a time, so that handing on and parsing small shares costs no more than large ones.
        at_once = _parse_records(source.index)
        steps = -(-at_once // (len(part.shards) * layout.share))
        shares = read_endlessly(source.index, part.shards, position, steps * layout.share)
        records = shares.map(lambda *shares: tuple(_join(share, steps, part) for share in shares))
        if steps * (part.stop - part.start) < at_once:  # a part of what was read
            records = records.rebatch(at_once)
        batches = _parse(source, records, layout.seed or 0).rebatch(batch_size, drop_remainder=True)
        return _finish(source, batches, training=True).apply(
            tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
        )

    return dataset_fn


def make_eval_dataset_fn(source: Source, global_batch_size: int, order: np.ndarray, block_records: int) -> Callable:
    """The evaluation input: the records with the numbers `order`, int64 [n], each exactly once.

    They are read in the order of the files, some `block_records` at a time. An evaluation takes `eval_steps(...)`
    batches for every replica: the last are padded with copies of a record, or zeros, and `example_weight` 0. More of
    those follow without an end: where an input has one, TensorFlow lets workers agree before every batch whether it has
    come, and one that cannot read leaves the others waiting there.

    Returns:
      dataset_fn(input_context) -> dataset of per-replica batches, as for training, and with `evaluation_place`, int64
      [B]: where each record is in `order`, 0 for padding.
    """
    places, records = np.argsort(order), len(order)
    numbers = order[places]

    def with_places(batch: Batch) -> Batch:
        found = tf.numpy_function(lambda record: places[np.searchsorted(numbers, record)], [batch['record']], tf.int64)
        return {**batch, 'evaluation_place': tf.ensure_shape(found, batch['record'].shape)}

    def dataset_fn(input_context: tf.distribute.InputContext) -> tf.data.Dataset:
        batch_size = input_context.get_per_replica_batch_size(global_batch_size)
        start, end = _pipeline_run(records, input_context.input_pipeline_id, input_context.num_input_pipelines)
        nothing = {**_empty_batch(source), 'evaluation_place': tf.zeros([0], tf.int64)}
        unpadded = tf.data.Dataset.from_tensors(nothing).repeat()
        if start < end:  # there may be fewer records than pipelines
            runs = shards.runs_of(numbers[start:end], source.index.firsts)
            starts, counts = shards.cut_blocks(runs, block_records, source.index.breaks)
            together = block_records // int(counts.max())  # of a sample, blocks are small
            shard = shards.Shard(0, starts, counts, together, seed=None)
            read = read_once(source.index, shard).rebatch(_parse_records(source.index))
            unpadded = _parse(source, read, seed=0).map(with_places).rebatch(batch_size).concatenate(unpadded)
        padded = _finish(source, unpadded.map(lambda batch: _pad(batch, batch_size)), training=False)
        return padded.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))

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


def _join(shares: tf.Tensor, steps: int, part: shards.Part) -> tf.Tensor:
    """Shares of `steps` steps, [shards, steps x share], as the rows of `part`, step after step: [steps x rows].

    In a step shard comes after shard, and the first replica's records come first.
    """
    by_shard = tf.reshape(shares, [len(part.shards), steps, -1])
    by_step = tf.reshape(tf.transpose(by_shard, [1, 0, 2]), [steps, -1])
    return tf.reshape(by_step[:, part.start : part.stop], [-1])


def _parse_records(index: Index) -> int:
    """How many records are parsed at once, where a global batch has fewer."""
    return max(1, min(PARSE_RECORDS, int(PARSE_BYTES / index.sizes.mean())))


def _parse(source: Source, records: tf.data.Dataset, seed: int) -> tf.data.Dataset:
    """Units of records, as `reading` gives them, as batches; `seed` is what their `seeds` are made of."""
    if not source.bad.skip:
        return records.map(lambda *unit: _parse_batch(source, seed, *unit), num_parallel_calls=tf.data.AUTOTUNE)

    def parse_repaired(serialized: tf.Tensor, numbers: tf.Tensor, epochs: tf.Tensor) -> Batch:
        repaired, weights = _repair(source, serialized, numbers)
        return _parse_batch(source, seed, repaired, numbers, epochs, weights)

    def parse_or_repair(*unit):
        """One element: the unit parsed, or where that fails, parsed with blanks for the records that are wrong."""
        unit = tf.data.Dataset.from_tensors(unit)
        at_once = unit.map(lambda *unit: _parse_batch(source, seed, *unit)).ignore_errors()
        repaired = unit.map(parse_repaired)
        return at_once.concatenate(repaired).take(1)

    return records.interleave(parse_or_repair, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def _repair(source: Source, serialized: tf.Tensor, numbers: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Puts a sound one where records are wrong, takes note of these, and gives them weight 0: float32 [n].

    The first sound one of these n, for what is made of zeros may be infinite, or NaN; where there is none, zeros.
    """
    blank = make_blank(source)

    def repair(serialized: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The payloads, with another for those that are wrong, and a weight for each."""
        repaired, weights = serialized.copy(), np.ones(len(numbers), np.float32)
        for i, record in enumerate(numbers):
            try:
                check_record(source.index, record, source.features, source.names, serialized[i])
            except UserError as wrong:
                weights[i] = 0
                source.bad.take_wrong(source.index, record, str(wrong))
        repaired[weights == 0] = serialized[weights.argmax()] if weights.any() else blank
        return repaired, weights

    repaired, weights = tf.numpy_function(repair, [serialized, numbers], [tf.string, tf.float32])
    return tf.ensure_shape(repaired, serialized.shape), tf.ensure_shape(weights, numbers.shape)


def parsing_spec(source: Source) -> dict[str, tf.io.FixedLenFeature]:
    """What tf.io.parse_example is told, by the names in the records. Records hold integers as int64."""
    stored = {'int32': 'int64', 'image': 'string'}
    return {
        source.names[name]: tf.io.FixedLenFeature(
            () if feature.dtype == 'image' else feature.shape, stored.get(feature.dtype, feature.dtype)
        )
        for name, feature in source.features.items()
    }


def _parse_batch(
    source: Source,
    seed: int,
    serialized: tf.Tensor,
    numbers: tf.Tensor,
    epochs: tf.Tensor,
    weights: tf.Tensor | None = None,
) -> Batch:
    """string, int64, int64, float32, each [n] -> features [n, ...], and what else a batch has."""
    # The names come back in the parser's error messages: `records.explain` reads them.
    names = tf.strings.as_string(numbers)
    parsed = tf.io.parse_example(serialized, parsing_spec(source), example_names=names)
    batch = {}
    for name, feature in source.features.items():
        value = parsed[source.names[name]]
        if feature.below is not None:
            value = _check_range(value, 0, feature.below, names)
        elif feature.dtype == 'int32':
            value = _check_range(value, INT32.min, INT32.max + 1, names)
        batch[name] = _decode(value, feature.shape) if feature.dtype == 'image' else tf.cast(value, feature.dtype)
    weights = tf.ones_like(numbers, tf.float32) if weights is None else weights
    batch = {**batch, 'record': numbers, 'example_weight': weights}
    return batch if source.prepare is unchanged else {**batch, SEEDS: of_readings(seed, epochs, numbers)}


def _empty_batch(source: Source) -> Batch:
    """What `_parse_batch` makes of no records."""
    decoded = {'image': 'uint8'}
    features = {
        name: tf.zeros([0, *feature.shape], decoded.get(feature.dtype, feature.dtype))
        for name, feature in source.features.items()
    }
    numbers = tf.zeros([0], tf.int64)
    batch = {**features, 'record': numbers, 'example_weight': tf.zeros([0])}
    return batch if source.prepare is unchanged else {**batch, SEEDS: of_readings(0, numbers, numbers)}


def _decode(encoded: tf.Tensor, shape: tuple[int, ...]) -> tf.Tensor:
    """string [n] -> uint8 [n, *shape]; several at a time."""
    image = tf.TensorSpec(shape, tf.uint8)
    return tf.map_fn(lambda one: decode_image(one, shape), encoded, fn_output_signature=image)


def _check_range(values: tf.Tensor, least: int, below: int, names: tf.Tensor) -> tf.Tensor:
    """Fails a batch with ids outside of [least, below), on the host: a GPU's gather would read zeros and say nothing.

    So would a cast to int32 that wraps around.
    """
    outside = tf.reduce_any((values < least) | (values >= below), axis=list(range(1, values.shape.rank)))
    named = 'Name: ' + tf.gather_nd(names, tf.where(outside)[:1])
    with tf.control_dependencies([tf.debugging.Assert(~tf.reduce_any(outside), [named])]):
        return tf.identity(values)


def _pad(batch: Batch, batch_size: int) -> Batch:
    """Adds rows up to `batch_size`, with `example_weight`, `record` and `evaluation_place` 0.

    They repeat the features of a sound record, for what is made of zeros may be infinite, or NaN; where there is no
    record at all, in the last batches of some replicas, they are zeros.
    """
    missing = batch_size - tf.shape(batch['record'])[0]

    def pad(name: str, value: tf.Tensor) -> tf.Tensor:
        row = tf.zeros([1, *value.shape[1:]], value.dtype)
        if name not in BATCH_NAMES:
            row = tf.concat([value, row], 0)[:1]
        return tf.ensure_shape(tf.concat([value, tf.repeat(row, missing, 0)], 0), [batch_size, *value.shape[1:]])

    return {name: pad(name, value) for name, value in batch.items()}


def _with_rows(name: str, value: tf.Tensor, rows: int) -> tf.Tensor:
    """What `prepare` made, which must have as many rows as it was given; raises UserError, or fails the batch."""
    if isinstance(value, tf.RaggedTensor | tf.SparseTensor):
        return value
    value = tf.convert_to_tensor(value)
    if not value.shape[:1].is_compatible_with([rows]):
        raise UserError(
            f'prepare: {name} has the shape {list(value.shape)}, and the batch has {rows} records: each keeps its row. '
            'Give a row that is not to count the example_weight 0.'
        )
    return tf.ensure_shape(value, [rows, *value.shape[1:]]) if value.shape.rank else value


def _finish(source: Source, batches: tf.data.Dataset, training: bool) -> tf.data.Dataset:
    """Lets the experiment prepare each per-replica batch."""

    def prepare(batch: Batch) -> Batch:
        batch, seeds = dict(batch), batch[SEEDS]
        del batch[SEEDS]
        own = {name: batch[name] for name in BATCH_NAMES if name in batch}
        prepared = call_prepare(source.prepare, batch, seeds, training)
        rows = batch['record'].shape[0]
        kept = {name: _with_rows(name, value, rows) for name, value in prepared.items()}
        return {**own, **kept}  # it may have made a new dict

    if source.prepare is not unchanged:
        batches = batches.map(prepare, num_parallel_calls=tf.data.AUTOTUNE)
    return batches.prefetch(tf.data.AUTOTUNE)
