"""The bytes of a TFRecord file, whatever it is compressed with, and how a record is framed in them."""

import functools
import zlib
from collections.abc import Callable

import numpy as np

# A record is its length (8 bytes, little-endian), a checksum of that (4), the payload, and a checksum of it (4).
HEADER_BYTES, FRAME_BYTES = 12, 16
CHUNK_BYTES = 1 << 20


class PlainFile:
    """A file as it is."""

    broken = False  # there is no compression that may be

    def __init__(self, path: str):
        self._file = open(path, 'rb')  # noqa: SIM115 (closed by close)

    def read(self, start: int, end: int) -> bytes:
        """Bytes [start, end); fewer where the file ends."""
        self._file.seek(start)
        return self._file.read(end - start)

    def close(self) -> None:
        self._file.close()


class CompressedFile:
    """What a gzip or zlib file holds. It reads forward; a range before the last one starts again from the beginning.

    Attributes:
      broken: whether a read met damage to the compression, or its early end: nothing can be read beyond.
    """

    def __init__(self, path: str):
        self._file = open(path, 'rb')  # noqa: SIM115 (closed by close)
        self.broken = False
        self._rewind()

    def _rewind(self) -> None:
        self._file.seek(0)
        # 32 more than the largest window: gzip and zlib headers are both recognised.
        self._inflate = zlib.decompressobj(wbits=zlib.MAX_WBITS + 32)
        self._input, self._buffer, self._position, self._ended = b'', b'', 0, False

    def read(self, start: int, end: int) -> bytes:
        """Bytes [start, end) of what it holds; fewer where that ends, or cannot be read beyond."""
        if start < self._position:
            self._rewind()
        parts = []
        while self._position < end:
            if not self._buffer and not self._fill():
                break
            skip = min(max(start - self._position, 0), len(self._buffer))
            take = self._buffer[skip : skip + end - max(start, self._position)]
            parts.append(take)
            self._buffer = self._buffer[skip + len(take) :]
            self._position += skip + len(take)
        return b''.join(parts)

    def _fill(self) -> bool:
        """Inflates the next part into the empty buffer; False at the end."""
        while not self._buffer and not self._ended:
            self._input = self._input or self._file.read(CHUNK_BYTES)
            if not self._input:
                self.broken = self._ended = True  # the end of the file before the end of the compression
                break
            try:
                self._buffer = self._inflate.decompress(self._input, CHUNK_BYTES)
            except zlib.error:
                self.broken = self._ended = True
                break
            self._input = self._inflate.unconsumed_tail
            if self._inflate.eof:
                # Files joined end to end are one; anything else after the end is padding.
                self._input = self._inflate.unused_data or self._file.read(CHUNK_BYTES)
                self._inflate = zlib.decompressobj(wbits=zlib.MAX_WBITS + 32)
                self._ended = not self._input.strip(b'\0')
        return bool(self._buffer)

    def close(self) -> None:
        self._file.close()


def open_stream(path: str, compression: str) -> PlainFile | CompressedFile:
    """The bytes of a file; `compression` is '', 'GZIP' or 'ZLIB'."""
    return CompressedFile(path) if compression else PlainFile(path)


def find_compression(path: str) -> str:
    """'GZIP', 'ZLIB', or '' for a plain file, by its first bytes.

    Only the frame of a first record tells plain from zlib for certain: a record of 40,056 bytes begins as zlib does.
    """
    with open(path, 'rb') as file:
        start = file.read(CHUNK_BYTES)
    if record_length(start) is not None:
        return ''
    if start[:2] == b'\x1f\x8b':
        return 'GZIP'
    looks_like_zlib = len(start) > 1 and start[0] & 0x8F == 8 and int.from_bytes(start[:2], 'big') % 31 == 0
    if looks_like_zlib:
        try:
            return 'ZLIB' if zlib.decompressobj().decompress(start, HEADER_BYTES) else ''
        except zlib.error:
            return ''
    return ''


def record_length(header: bytes) -> int | None:
    """The payload bytes of the record whose first 12 bytes are given; None where they are no beginning of a record."""
    if len(header) < HEADER_BYTES:
        return None
    words = np.frombuffer(header[:HEADER_BYTES], np.uint8)[None]
    return int.from_bytes(header[:8], 'little') if _are_headers(words)[0] else None


def find_header(
    stream: PlainFile | CompressedFile,
    start: int,
    stop: int | None = None,
    report: Callable[[int], None] = lambda place: None,
) -> tuple[int, bool]:
    """The first place in [start, stop) where a record begins, and True; else where the search ended, and False.

    Now and then `report` is told how far it is, and may raise.

    Lengths of 4 GiB and more are not looked for: four zero bytes in the length are a quick first test.
    """
    while stop is None or start < stop:
        report(start)
        chunk = stream.read(start, start + CHUNK_BYTES + HEADER_BYTES - 1)
        if len(chunk) < HEADER_BYTES:
            return start + len(chunk), False
        if chunk.count(0) == len(chunk):  # as after a crash: no header, for the checksum of a length of 0 is not 0
            start += len(chunk) - HEADER_BYTES + 1
            start = start if stop is None else min(start, stop)
            continue
        places = np.lib.stride_tricks.sliding_window_view(np.frombuffer(chunk, np.uint8), HEADER_BYTES)
        if stop is not None:
            places = places[: stop - start]
        likely = np.flatnonzero(~places[:, 4:8].any(axis=1))
        found = likely[_are_headers(places[likely])]
        if len(found):
            return start + int(found[0]), True
        start += len(places)
    return start, False


def _are_headers(headers: np.ndarray) -> np.ndarray:
    """Which of some rows of 12 bytes are a length and its checksum: uint8 [n, 12] -> bool [n].

    The checksum is CRC-32C (Castagnoli), rotated by 15 bits and offset, as in tensorflow/core/lib/hash/crc32c.h.
    """
    table = _crc_table()
    crc = np.full(len(headers), 0xFFFFFFFF, np.uint32)
    for column in range(8):
        crc = table[(crc ^ headers[:, column]) & np.uint32(0xFF)] ^ (crc >> np.uint32(8))
    crc = ~crc
    masked = ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(0xA282EAD8)
    stored = np.ascontiguousarray(headers[:, 8:12]).view('<u4')[:, 0]
    return masked == stored


@functools.cache
def _crc_table() -> np.ndarray:
    """CRC-32C of every byte, uint32 [256]."""
    crc = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        crc = np.where(crc & 1, (crc >> np.uint32(1)) ^ np.uint32(0x82F63B78), crc >> np.uint32(1))
    return crc
