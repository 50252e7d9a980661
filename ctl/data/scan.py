"""Finds every record of one file with TensorFlow's own reader; where that stops at damage, the next sound record."""

import dataclasses
import hashlib
import os
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from ctl.data.streams import (
    FRAME_BYTES,
    HEADER_BYTES,
    CompressedFile,
    PlainFile,
    find_compression,
    find_header,
    open_stream,
    record_length,
)
from ctl.errors import UserError
from ctl.kinds import START_BYTES, kind_of, looks_like_text

# Records looked at together, and how often in one call: progress is reported after each call. A call on a compressed
# file reads it from its beginning, so there are to be few.
BATCH_RECORDS, BATCHES, COMPRESSED_BATCHES = 128, 512, 1 << 16
SHOWN_CHARACTERS = 40  # of a file that is text


@dataclasses.dataclass(frozen=True)
class Damage:
    """One record that cannot be read.

    Attributes:
      number: the record's, in its file, counting from 0.
      start, size: the bytes lost, in what the file holds uncompressed.
      problem: in words: 'has a wrong checksum'.
    """

    number: int
    start: int
    size: int
    problem: str


@dataclasses.dataclass(frozen=True)
class FileRecords:
    """What one file holds.

    Attributes:
      size: bytes of the file.
      changed: its modification time, ns.
      compression: '', 'GZIP' or 'ZLIB'.
      sizes: bytes of each sound record with its frame, uncompressed, uint32 [records].
      damaged: the records that cannot be read, in order.
      fingerprint: 16 hex digits, of all sound records.
    """

    size: int
    changed: int
    compression: str
    sizes: np.ndarray
    damaged: tuple[Damage, ...]
    fingerprint: str


def scan(path: str, advance: Callable[[int], None]) -> FileRecords:
    """Reads a file from end to end and checks every checksum in it.

    Args:
      path: the file.
      advance: called with bytes of the file done, now and then.

    Raises:
      UserError: when it cannot be read, holds no sound record, or is written to meanwhile.
    """
    try:
        return _scan(path, advance)
    except OSError as error:
        raise UserError(f'{path} cannot be read: {error.strerror}.') from None
    except (tf.errors.NotFoundError, tf.errors.PermissionDeniedError) as error:
        why = 'it is gone' if isinstance(error, tf.errors.NotFoundError) else 'permission denied'
        raise UserError(f'{path} cannot be read: {why}.') from None


def _scan(path: str, advance: Callable[[int], None]) -> FileRecords:
    before, compression = os.stat(path), find_compression(path)
    sizes, hashes, damaged = [np.zeros(0, np.uint32)], [], []
    records = position = reported = 0

    def report(place: int) -> None:
        nonlocal reported
        if not compression:
            advance(place - reported)
            reported = place

    stream = open_stream(path, compression)
    try:
        while True:
            more, digests, sound = _read_sound(path, compression, position)
            sizes.append(more)
            hashes.append(digests)
            records += len(more)
            position += int(more.sum(dtype=np.int64))
            report(position)
            if sound and len(more) == BATCH_RECORDS * _batches(compression):
                continue
            if sound and not stream.read(position, position + 1) and not stream.broken:
                break
            if not position and record_length(stream.read(0, HEADER_BYTES)) is None:
                _check_kind(path, stream.read(0, START_BYTES), compression)
            damage, more_follows = _find_damage(stream, position, records + len(damaged), report)
            damaged.append(damage)
            position += damage.size
            if not more_follows:
                break
    finally:
        stream.close()
    after = os.stat(path)
    if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise UserError(f'{path}: changed while it was read. Start again when nothing writes to it.')
    if not records:
        said = f'record 0 {damaged[0].problem}, and no sound record follows' if damaged else 'it holds no records'
        raise UserError(f'{path}: {said}. Is it a TFRecord file?')
    advance(before.st_size - reported)
    fingerprint = hashlib.sha256(np.concatenate(hashes).tobytes()).hexdigest()[:16]
    return FileRecords(
        before.st_size, before.st_mtime_ns, compression, np.concatenate(sizes), tuple(damaged), fingerprint
    )


def _check_kind(path: str, start: bytes, compression: str) -> None:
    """Raises UserError where a file whose first record is not sound is another kind of file, by how it begins.

    Before a record is searched for in all of it.

    Args:
      start: its first bytes, uncompressed.
    """
    kind, remedy = kind_of(start)
    if not kind and start and looks_like_text(start):
        words = ' '.join(start.decode('utf8', 'ignore').split())
        kind = f'text, which begins with {words[:SHOWN_CHARACTERS]!r}'
    if kind:
        it_is = f'compressed with {compression.lower()} it is' if compression else 'it is'
        raise UserError(f'{path}: {it_is} {kind}, and no TFRecord file: {remedy or "make TFRecords of it"}.')


def _batches(compression: str) -> int:
    return COMPRESSED_BATCHES if compression else BATCHES


def _read_sound(path: str, compression: str, position: int) -> tuple[np.ndarray, np.ndarray, bool]:
    """Sound records from `position` on: frame sizes uint32 [n], hashes int64 [n], and whether none of them failed.

    Where they are BATCH_RECORDS times the batches of a call, more may follow.
    """
    batches = _batches(compression)
    arguments = (tf.constant(path), tf.constant(position, tf.int64), compression)
    try:
        return *_as_numpy(_read(*arguments, BATCH_RECORDS, batches, False)), True
    except (tf.errors.DataLossError, tf.errors.OutOfRangeError):
        pass
    # Up to the batch with the damage, and then one by one up to the damage.
    sizes, hashes = _as_numpy(_read(*arguments, BATCH_RECORDS, batches, True))
    position += int(sizes.sum(dtype=np.int64))
    arguments = (tf.constant(path), tf.constant(position, tf.int64), compression)
    rest, more = _as_numpy(_read(*arguments, 1, BATCH_RECORDS, True))
    return np.concatenate([sizes, rest]), np.concatenate([hashes, more]), False


def _as_numpy(read: tuple[tf.Tensor, tf.Tensor]) -> tuple[np.ndarray, np.ndarray]:
    lengths, hashes = (each.numpy().ravel() for each in read)
    there = lengths >= 0
    return (lengths[there] + FRAME_BYTES).astype(np.uint32), hashes[there]


@tf.function(reduce_retracing=True)
def _read(path, position, compression: str, batch: int, batches: int, up_to_damage: bool):
    """Lengths int32 [n] and hashes int64 [n] of the payloads from a byte offset on; one trace serves every file.

    Both are padded with -1.
    """

    def open_at(offset):  # the reader takes an offset only inside a flat_map
        variant = tf.raw_ops.TFRecordDatasetV2(
            filenames=[path], compression_type=compression, buffer_size=1 << 20, byte_offsets=[offset]
        )
        return tf.data.experimental.from_variant(variant, tf.TensorSpec([], tf.string))

    read = tf.data.Dataset.from_tensors(position).flat_map(open_at).batch(batch)
    read = read.map(lambda s: (tf.strings.length(s), tf.strings.to_hash_bucket_fast(s, 2**63 - 1)))
    if up_to_damage:
        read = read.ignore_errors()
    nothing = tf.data.Dataset.from_tensors((tf.zeros([0], tf.int32), tf.zeros([0], tf.int64)))
    minus_one = tf.constant(-1), tf.constant(-1, tf.int64)
    whole = nothing.concatenate(read.take(batches)).padded_batch(batches + 1, padding_values=minus_one)
    # A single element and no loop: an iterator would take 15 ms for every file.
    return whole.get_single_element()


class _Extent(NamedTuple):
    """Where a damaged record ends, whether anything may follow it, and what is wrong with it."""

    end: int
    more_follows: bool
    problem: str


def _find_damage(
    stream: PlainFile | CompressedFile, start: int, number: int, report: Callable[[int], None]
) -> tuple[Damage, bool]:
    """What is wrong with the record at `start`, which the reader refused, and whether records may follow it."""
    length = record_length(stream.read(start, start + HEADER_BYTES))
    if length is None:
        end, more_follows, problem = _without_length(stream, start, report)
    else:
        end, more_follows, problem = _with_length(stream, start, start + FRAME_BYTES + length, report)
    if stream.broken and not more_follows:
        problem = 'is damaged or cut off, and a compressed file cannot be read beyond'
    return Damage(number, start, end - start, problem), more_follows


def _without_length(stream: PlainFile | CompressedFile, start: int, report: Callable[[int], None]) -> _Extent:
    """Nothing says where the next record begins: it is searched for."""
    end, found = find_header(stream, start + 1, report=report)
    is_rest = not found and end - start < FRAME_BYTES  # too short for any record
    return _Extent(end, found, 'is cut off' if is_rest else 'has a damaged length')


def _with_length(stream: PlainFile | CompressedFile, start: int, end: int, report: Callable[[int], None]) -> _Extent:
    """The length leads to the next record, at `end`, unless another begins before that.

    Then a writer died in the middle of this one, and a later one went on.
    """
    beyond = stream.read(end - 1, end + HEADER_BYTES)  # its last byte, and the header of the next
    is_whole, is_last = len(beyond) > 0, len(beyond) == 1
    if is_last or record_length(beyond[1:]) is not None:
        return _Extent(end, True, 'has a wrong checksum')
    # From its own header on: where that was cut off too, its last bytes are the first of another.
    inside, found = find_header(stream, start + 1, end, report)
    if found or not is_whole:
        return _Extent(inside, found, 'is cut off')
    return _Extent(end, True, 'has a wrong checksum')  # and so has the next header, which is met next
