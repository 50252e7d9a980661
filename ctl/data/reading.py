"""Reads the records of a shard in its order, window by window, from any place in it."""

import threading

import numpy as np
import tensorflow as tf

from ctl.data import shards
from ctl.data.index import Index
from ctl.data.streams import FRAME_BYTES, HEADER_BYTES, CompressedFile
from ctl.errors import UserError

READ_BUFFER_BYTES = 1 << 18


def read_shard(index: Index, shard: shards.Shard, position: int, windows: int | None = None) -> tf.data.Dataset:
    """Windows of one shard from record `position` on: (serialized string [n], record number int64 [n]).

    Endless, or the first `windows` windows. Only the window that holds `position` is read again after a resume.
    """
    first, skip = shard.locate(position)
    paths = tf.constant(index.files)
    compressed = CompressedRecords(index) if index.sequential[_files_of(index, shard.starts)].any() else None

    def plan(number: np.int64):
        window = shard.window(int(number))
        files = _files_of(index, window.starts)
        index.check_unchanged(np.unique(files))
        plain = np.where(index.sequential[files], 0, window.counts)
        leaving = slice(skip if number == first else 0, None)
        return (
            *(files, index.starts[window.starts], plain, window.starts, window.counts),
            *(window.order[leaving], window.records[leaving]),
        )

    def read_block(file, offset, plain, start, count):
        variant = tf.raw_ops.TFRecordDatasetV2(
            filenames=[paths[file]], compression_type='', buffer_size=READ_BUFFER_BYTES, byte_offsets=[offset]
        )
        read = tf.data.experimental.from_variant(variant, tf.TensorSpec([], tf.string)).take(plain)
        if compressed is None:
            return read
        inflated = tf.numpy_function(compressed.read, [start, count - plain], tf.string)
        return read.concatenate(tf.data.Dataset.from_tensor_slices(tf.ensure_shape(inflated, [None])))

    def read_window(number):
        planned = tf.numpy_function(plan, [number], [tf.int64] * 7)
        for vector in planned:
            vector.set_shape([None])
        *blocks, order, records = planned
        # The reader with byte offsets works only inside a flat_map (its graph form loses the offsets elsewhere).
        read = tf.data.Dataset.from_tensor_slices(tuple(blocks)).flat_map(read_block)
        whole = read.batch(tf.reduce_sum(blocks[-1]))
        return whole.map(lambda serialized: (tf.gather(serialized, order), records))

    last = tf.int64.max if windows is None else first + windows
    return tf.data.Dataset.range(first, last).flat_map(read_window).prefetch(1)


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
