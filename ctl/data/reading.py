"""Reads the records of shards in their order, window by window, from any place on."""

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ctl.data import shards
from ctl.data.index import Index
from ctl.data.streams import FRAME_BYTES, HEADER_BYTES, CompressedFile
from ctl.errors import UserError

READ_BUFFER_BYTES = 1 << 18


def read_endlessly(index: Index, mine: Sequence[shards.Shard], position: int, records: int) -> tf.data.Dataset:
    """The next `records` records of every shard, each from its record `position` on, again and again.

    After a resume only the windows that hold `position` are read again, and of a compressed file what comes before.

    Returns:
      Dataset of (serialized string, record number int64, epoch int64), each [shards, records].
    """
    reader = _WindowReader(index, mine, [shard.locate(position) for shard in mine])
    first = tf.constant([begin.window for begin in reader.begin], tf.int64)

    def read_shard(place: tf.Tensor) -> tf.data.Dataset:
        numbers = tf.data.Dataset.range(first[place], tf.int64.max)
        windows = numbers.flat_map(lambda number: reader.read(place, number))
        return windows.prefetch(1).rebatch(records, drop_remainder=True)

    # All shards through one function, in turn: there may be 64, and to trace and start each takes time.
    return tf.data.Dataset.range(len(mine)).interleave(read_shard, cycle_length=len(mine)).batch(len(mine), True)


def read_once(index: Index, shard: shards.Shard) -> tf.data.Dataset:
    """One epoch of a shard, window by window: (serialized string, record number int64, epoch int64, 0), each [n]."""
    reader = _WindowReader(index, [shard], [shard.locate(0)])
    zero = tf.constant(0, tf.int64)
    return tf.data.Dataset.range(shard.windows).flat_map(lambda number: reader.read(zero, number)).prefetch(1)


class _Block(NamedTuple):
    """Where a block is and how it is read; or a window's blocks, with vectors in place of scalars.

    Attributes:
      path: its file, string.
      offset: the byte at which its first record begins, int64.
      size: its bytes, int64.
      plain: how many records TensorFlow's reader takes: all, or none where the file is compressed, int64.
      inflated: how many are inflated here: none, or all, int64.
      first: the number of its first record, int64.
    """

    path: Any
    offset: Any
    size: Any
    plain: Any
    inflated: Any
    first: Any


class _WindowPlan(NamedTuple):
    """How a window is read.

    Attributes:
      blocks: a place for each block.
      order: the places, in the blocks laid end to end, of the records that leave it, in their order, int64 [n].
      records: the numbers of these, int64 [n].
      epochs: in which of its shard's epochs each is read, int64 [n].
    """

    blocks: _Block
    order: Any
    records: Any
    epochs: Any


_DTYPES = _WindowPlan(_Block(tf.string, *[tf.int64] * 5), tf.int64, tf.int64, tf.int64)


class _WindowReader:
    """Reads the windows of some shards, each as a dataset of one element.

    Attributes:
      begin: the place in each shard where reading begins: nothing before it leaves that window.
    """

    def __init__(self, index: Index, mine: Sequence[shards.Shard], begin: Sequence[shards.Place]):
        self.begin = begin
        self._index, self._mine = index, mine
        self._paths = np.array([path.encode() for path in index.files], object)
        self._compressed = [CompressedRecords(index) for _ in mine]  # each with a file of its own open
        self._any_compressed = any(index.sequential[_files_of(index, shard.starts)].any() for shard in mine)

    def read(self, place: tf.Tensor, number: tf.Tensor) -> tf.data.Dataset:
        """Window `number` of the shard at `place`: one element, serialized string, record number, epoch, each [n]."""
        # Only flat tuples of tensors cross from NumPy.
        planned = tf.numpy_function(self._plan_flat, [place, number], tf.nest.flatten(_DTYPES))
        plan = tf.nest.pack_sequence_as(_DTYPES, [tf.ensure_shape(vector, [None]) for vector in planned])
        # The reader with byte offsets works only inside a flat_map (its graph form loses the offsets elsewhere).
        blocks = tf.data.Dataset.from_tensor_slices(plan.blocks)
        payloads = blocks.flat_map(lambda block: self._read_block(place, block))
        whole = payloads.batch(tf.reduce_sum(plan.blocks.plain + plan.blocks.inflated))
        return whole.map(lambda serialized: (tf.gather(serialized, plan.order), plan.records, plan.epochs))

    def _plan_flat(self, place: np.int64, number: np.int64) -> list[np.ndarray]:
        return tf.nest.flatten(self._plan(place, int(number)))

    def _plan(self, place: int, number: int) -> _WindowPlan:
        """In NumPy, when the window's turn comes."""
        index, begin, shard = self._index, self.begin[place], self._mine[place]
        window = shard.window(number)
        files = _files_of(index, window.starts)
        index.check_unchanged(np.unique(files))
        compressed = index.sequential[files]
        blocks = _Block(
            path=self._paths[files],
            offset=index.starts[window.starts],
            size=index.starts[window.starts + window.counts - 1]
            + index.sizes[window.starts + window.counts - 1]
            - index.starts[window.starts],
            plain=np.where(compressed, 0, window.counts),
            inflated=np.where(compressed, window.counts, 0),
            first=window.starts,
        )
        skipped = begin.skip if number == begin.window else 0
        records = window.records[skipped:]
        epochs = np.full(len(records), number // shard.windows)
        return _WindowPlan(blocks, window.order[skipped:], records, epochs)

    def _read_block(self, place: tf.Tensor, block: _Block) -> tf.data.Dataset:
        """The payloads of one block: from TensorFlow's reader where the file is plain, else inflated here."""
        variant = tf.raw_ops.TFRecordDatasetV2(
            filenames=[block.path],
            compression_type='',
            buffer_size=tf.minimum(block.size, READ_BUFFER_BYTES),  # a block may be one record, and no more is read
            byte_offsets=[block.offset],
        )
        read = tf.data.experimental.from_variant(variant, tf.TensorSpec([], tf.string)).take(block.plain)
        if not self._any_compressed:
            return read
        inflated = tf.numpy_function(self._inflate, [place, block.first, block.inflated], tf.string)
        return read.concatenate(tf.data.Dataset.from_tensor_slices(tf.ensure_shape(inflated, [None])))

    def _inflate(self, place: np.int64, first: np.int64, count: np.int64) -> np.ndarray:
        return self._compressed[place].read(first, count)


def _files_of(index: Index, records: np.ndarray) -> np.ndarray:
    return np.searchsorted(index.firsts, records, side='right') - 1


class CompressedRecords:
    """Runs of records of compressed files, read forward in the one file that is open."""

    def __init__(self, index: Index):
        self._index, self._file, self._stream = index, -1, None
        self._lock = threading.Lock()

    def read(self, start: int, count: int) -> np.ndarray:
        """The payloads of records [start, start + count), all in one file: bytes [count]."""
        if not count:
            return np.zeros(0, object)
        with self._lock:
            index, file = self._index, int(_files_of(self._index, start))
            if file != self._file:
                if self._stream:
                    self._stream.close()
                self._file, self._stream = file, CompressedFile(index.files[file])
            starts = index.starts[start : start + count]
            ends = starts + index.sizes[start : start + count]
            data = self._stream.read(int(starts[0]), int(ends[-1]))
        if len(data) < ends[-1] - starts[0]:
            raise UserError(f'{index.name(int(start))}: cannot be inflated any more.')
        payloads = zip(starts - starts[0] + HEADER_BYTES, ends - starts[0] - FRAME_BYTES + HEADER_BYTES, strict=True)
        return np.array([data[a:b] for a, b in payloads], object)
