"""Which records there are: the files of a glob, and the byte offset of every record in them."""

import concurrent.futures
import dataclasses
import functools
import glob
import hashlib
import os
import pathlib

import numpy as np
import tensorflow as tf

from ctl import cache
from ctl.errors import UserError

# A record in a TFRecord file is its length (8 bytes), a checksum of that (4), the payload, and a checksum of it (4).
FRAME_BYTES = 16


@dataclasses.dataclass(frozen=True)
class Index:
    """The records of some files, numbered from 0 through the files in order.

    Attributes:
      files: paths, sorted.
      offsets: per file, int64 [records + 1]: the byte each record starts at, and the end of the last.
    """

    files: tuple[str, ...]
    offsets: tuple[np.ndarray, ...]

    @functools.cached_property
    def counts(self) -> np.ndarray:
        """Records in each file, int64 [files]."""
        return np.array([len(offsets) - 1 for offsets in self.offsets], np.int64)

    @functools.cached_property
    def firsts(self) -> np.ndarray:
        """The number of each file's first record, and the number of records in all, int64 [files + 1]."""
        return np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int64)

    @property
    def records(self) -> int:
        return int(self.firsts[-1])

    @functools.cached_property
    def digest(self) -> str:
        """16 hex digits that change when a file is added, removed, renamed, or holds more or fewer bytes or records."""
        files = [(os.path.basename(f), int(o[-1]), len(o)) for f, o in zip(self.files, self.offsets, strict=True)]
        return hashlib.sha256(repr(files).encode()).hexdigest()[:16]

    def locate(self, records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """File and number within the file of each record, both of the shape of `records`."""
        files = np.searchsorted(self.firsts, records, side='right') - 1
        return files, records - self.firsts[files]

    def name(self, record: int) -> str:
        """'file: record number', as error messages have it. Numbers count from 0 in each file."""
        file, number = self.locate(np.int64(record))
        return f'{self.files[file]}: record {number}'

    def read(self, record: int) -> bytes:
        """One record's payload."""
        file, number = self.locate(np.int64(record))
        start, end = self.offsets[file][number : number + 2]
        with open(self.files[file], 'rb') as stream:
            stream.seek(start + 12)
            return stream.read(end - start - FRAME_BYTES)


def find_files(patterns: str, key: str) -> list[str]:
    """The files that a comma-separated list of globs matches, sorted, each once.

    Args:
      patterns: the globs.
      key: the config key they come from, for errors.

    Raises:
      UserError: when a glob matches nothing, or a file is empty, unreadable or compressed.
    """
    files = set()
    for pattern in filter(None, (part.strip() for part in patterns.split(','))):
        found = [path for path in glob.glob(os.path.expanduser(pattern), recursive=True) if os.path.isfile(path)]
        if not found:
            raise UserError(f'{key}={pattern}: no file matches. Is the path right, seen from {os.getcwd()}?')
        files.update(found)
    for path in sorted(files):
        try:
            with open(path, 'rb') as stream:
                start = stream.read(2)
        except OSError as error:
            raise UserError(f'{key}: {path} cannot be read: {error.strerror}.') from None
        if not start:
            raise UserError(f'{key}: {path} has 0 bytes. Remove it, or write it again.')
        if start == b'\x1f\x8b':
            raise UserError(
                f'{key}: {path} is compressed with gzip. Records are read from any place in a file: gunzip it.'
            )
    return sorted(files)


def load_index(files: list[str]) -> Index:
    """The index of `files`, from the cache where a file has been indexed before and has not changed since.

    Indexing reads a file once, whole, and checks every checksum in it.

    Raises:
      UserError: naming the file and the number of a damaged record.
    """
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return Index(tuple(files), tuple(pool.map(_load_offsets, files)))


def _load_offsets(path: str) -> np.ndarray:
    """int64 [records + 1] of one file, by way of the cache: path, size and modification time are the key."""
    stat = os.stat(path)
    identity = f'{os.path.abspath(path)}\n{stat.st_size}\n{stat.st_mtime_ns}'
    stored = cache.cache_folder() / 'index' / f'{hashlib.sha256(identity.encode()).hexdigest()[:32]}.npy'
    if stored.exists():
        return np.load(stored)
    offsets = _scan(path)
    if offsets[-1] != stat.st_size:
        raise UserError(f'{path}: changed while it was read. Start again when nothing writes to it.')
    with cache.appears_whole(stored) as scratch, open(scratch, 'wb') as stream:
        np.save(stream, offsets)
    return offsets


def _scan(path: str) -> np.ndarray:
    """Reads a file from end to end with TensorFlow's own reader and adds up the lengths."""
    lengths = tf.data.TFRecordDataset(path, buffer_size=8 << 20).batch(1024).map(tf.strings.length)
    try:
        sizes = [batch.numpy() for batch in lengths]
    except tf.errors.DataLossError as error:
        raise UserError(_damage(path, error)) from None
    sizes = np.concatenate(sizes).astype(np.int64) + FRAME_BYTES
    return np.concatenate([[0], np.cumsum(sizes)])


def _damage(path: str, error: tf.errors.DataLossError) -> str:
    """Says which record is damaged, and how: the batch that failed is read again one by one."""
    sound = 0
    try:
        for _ in tf.data.TFRecordDataset(path):
            sound += 1
    except tf.errors.DataLossError:
        pass
    kind = 'is cut off' if 'truncated' in error.message else 'has a wrong checksum'
    hint = ' Is it a TFRecord file, and not compressed?' if sound == 0 else ' Write the file again, or remove it.'
    return f'{path}: record {sound} {kind}.{hint}'


def common_folder(files: list[str] | tuple[str, ...]) -> pathlib.Path:
    """The deepest folder that holds all `files`, for shorter listings."""
    return pathlib.Path(os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in files]))
