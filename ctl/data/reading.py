"""Reads the records of shards in their order, window by window, from any place on."""

import threading
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from ctl.data import shards
from ctl.data.index import Index
from ctl.data.streams import FRAME_BYTES, HEADER_BYTES, CompressedFile
from ctl.errors import UserError

READ_BUFFER_BYTES = 1 << 18


def read_endlessly(index: Index, mine: Sequence[shards.Shard], position: int, records: int) -> tf.data.Dataset:
    """The next `records` records of every shard, each from its record `position` on, again and again.

    Only the windows that hold `position` are read again after a resume.

    Returns:
      Dataset of (serialized string [shards, records], record number int64 [shards, records]).
    """
    begin = [shard.locate(position) for shard in mine]
    read_window = _make_window_reader(index, mine, begin)
    first = tf.constant([window for window, _ in begin], tf.int64)

    def read_shard(place):
        windows = tf.data.Dataset.range(first[place], tf.int64.max).flat_map(lambda number: read_window(place, number))
        return windows.prefetch(1).rebatch(records, drop_remainder=True)

    # All shards through one function, in turn: there may be 64, and to trace and start each takes time.
    return tf.data.Dataset.range(len(mine)).interleave(read_shard, cycle_length=len(mine)).batch(len(mine), True)


def read_once(index: Index, shard: shards.Shard) -> tf.data.Dataset:
    """One epoch of a shard, window by window: (serialized string [n], record number int64 [n])."""
    read_window = _make_window_reader(index, [shard], [(0, 0)])
    zero = tf.constant(0, tf.int64)
    return tf.data.Dataset.range(shard.windows).flat_map(lambda number: read_window(zero, number)).prefetch(1)


def _make_window_reader(index: Index, mine: Sequence[shards.Shard], begin: Sequence[tuple[int, int]]) -> Callable:
    """A function from a place in `mine` and a window's number to its records, as a dataset of one element.

    `begin` has each shard's first window, and how many of its records are left out.
    """
    paths = np.array([path.encode() for path in index.files], object)
    compressed = [CompressedRecords(index) for _ in mine]  # each with a file of its own open
    any_compressed = any(index.sequential[_files_of(index, shard.starts)].any() for shard in mine)

    def plan(place: np.int64, number: np.int64) -> tuple[np.ndarray, ...]:
        """What to read for a window: of each block path, offset, records if plain, first record, records; the order."""
        shard, (first, skip) = mine[place], begin[place]
        window = shard.window(int(number))
        files = _files_of(index, window.starts)
        index.check_unchanged(np.unique(files))
        plain = np.where(index.sequential[files], 0, window.counts)
        leaving = slice(skip if number == first else 0, None)
        return (
            *(paths[files], index.starts[window.starts], plain, window.starts, window.counts),
            *(window.order[leaving], window.records[leaving]),
        )

    def inflate(place: np.int64, start: np.int64, count: np.int64) -> np.ndarray:
        return compressed[place].read(start, count)

    def read_window(place: tf.Tensor, number: tf.Tensor) -> tf.data.Dataset:
        """The window as one element: (serialized string [n], record number int64 [n])."""
        *blocks, order, records = tf.numpy_function(plan, [place, number], [tf.string] + [tf.int64] * 6)
        for vector in (*blocks, order, records):
            vector.set_shape([None])

        def read_block(path, offset, plain, start, count) -> tf.data.Dataset:
            """The payloads of one block: from TensorFlow's reader where the file is plain, else inflated here."""
            variant = tf.raw_ops.TFRecordDatasetV2(
                filenames=[path], compression_type='', buffer_size=READ_BUFFER_BYTES, byte_offsets=[offset]
            )
            read = tf.data.experimental.from_variant(variant, tf.TensorSpec([], tf.string)).take(plain)
            if not any_compressed:
                return read
            inflated = tf.numpy_function(inflate, [place, start, count - plain], tf.string)
            return read.concatenate(tf.data.Dataset.from_tensor_slices(tf.ensure_shape(inflated, [None])))

        # The reader with byte offsets works only inside a flat_map (its graph form loses the offsets elsewhere).
        read = tf.data.Dataset.from_tensor_slices(tuple(blocks)).flat_map(read_block)
        whole = read.batch(tf.reduce_sum(blocks[-1]))
        return whole.map(lambda serialized: (tf.gather(serialized, order), records))

    return read_window


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
