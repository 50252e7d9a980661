"""Which records there are: the files of a glob, and where every sound record in them begins."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import rich.console
import rich.progress

from ctl.data import tables
from ctl.data.scan import Damage, FileRecords, scan
from ctl.data.streams import FRAME_BYTES, HEADER_BYTES, open_stream
from ctl.errors import GuardError, UserError

# Scans that take less are not worth a line.
QUIET_SECONDS = 1.0
CHECK_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class Index:
    """The sound records of some files, numbered from 0 through the files in order.

    Attributes:
      files: paths, sorted.
      contents: what each holds.
    """

    files: tuple[str, ...]
    contents: tuple[FileRecords, ...]

    @functools.cached_property
    def counts(self) -> np.ndarray:
        """Sound records in each file, int64 [files]."""
        return np.array([len(content.sizes) for content in self.contents], np.int64)

    @functools.cached_property
    def firsts(self) -> np.ndarray:
        """The number of each file's first record, and the number of records in all, int64 [files + 1]."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.counts)])

    @property
    def records(self) -> int:
        return int(self.firsts[-1])

    @functools.cached_property
    def sizes(self) -> np.ndarray:
        """Bytes of each record with its frame, uncompressed, uint32 [records]."""
        return np.concatenate([content.sizes for content in self.contents])

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """Where each record begins in what its file holds uncompressed, in bytes, int64 [records]."""
        ends = np.cumsum(self.sizes, dtype=np.int64)
        starts = ends - self.sizes
        starts -= np.repeat(starts[self.firsts[:-1]], self.counts)
        for file in self._with_damage:
            for before, damage in enumerate(self.contents[file].damaged):
                starts[self.firsts[file] + damage.number - before : self.firsts[file + 1]] += damage.size
        return starts

    @functools.cached_property
    def breaks(self) -> np.ndarray:
        """The records, in order, that follow a damaged one in the same file: nothing is read across."""
        after = [
            self.firsts[file] + damage.number - before
            for file in self._with_damage
            for before, damage in enumerate(self.contents[file].damaged)
        ]
        return np.unique(np.array(after, np.int64))

    @functools.cached_property
    def sequential(self) -> np.ndarray:
        """Which files are compressed, and can only be read from their beginning on, bool [files]."""
        return np.array([bool(content.compression) for content in self.contents])

    @functools.cached_property
    def _with_damage(self) -> list[int]:
        return [file for file, content in enumerate(self.contents) if content.damaged]

    @property
    def damaged(self) -> list[tuple[str, Damage]]:
        """Every damaged record with its file."""
        return [(self.files[file], damage) for file in self._with_damage for damage in self.contents[file].damaged]

    @functools.cached_property
    def digest(self) -> str:
        """16 hex digits that change when a file is added, removed or renamed, or holds other records."""
        files = [(os.path.basename(f), c.fingerprint) for f, c in zip(self.files, self.contents, strict=True)]
        return hashlib.sha256(repr(files).encode()).hexdigest()[:16]

    def locate(self, records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """File and number within the file, damaged ones counted, of each record; both of the shape of `records`."""
        files = np.searchsorted(self.firsts, records, side='right') - 1
        numbers = records - self.firsts[files]
        for file in self._with_damage:
            for damage in self.contents[file].damaged:
                numbers = numbers + ((files == file) & (damage.number <= numbers))
        return files, numbers

    def name(self, record: int) -> str:
        """'file: record number', as error messages have it. Numbers count from 0 in each file."""
        file, number = self.locate(np.int64(record))
        return f'{self.files[file]}: record {number}'

    def read(self, record: int) -> bytes:
        """One record's payload."""
        file = int(self.locate(np.int64(record))[0])
        start = int(self.starts[record])
        stream = open_stream(self.files[file], self.contents[file].compression)
        try:
            return stream.read(start + HEADER_BYTES, start + int(self.sizes[record]) - FRAME_BYTES + HEADER_BYTES)
        finally:
            stream.close()

    def check_unchanged(self, files: Iterable[int]) -> None:
        """Raises UserError when one of `files`, by number, has not the size or time that it was indexed with."""
        for file in files:
            if not tables.is_as_indexed(self.files[file], self.contents[file]):
                raise UserError(
                    f'{self.files[file]}: changed since it was indexed. Start again when nothing writes to it.'
                )


def load_index(
    files: Sequence[str],
    console: rich.console.Console | None = None,
    fresh: bool = False,
    check: Callable[[], None] = lambda: None,
) -> Index:
    """The index of `files`: from beside them or from the cache, for every file that has not changed since.

    Indexing reads a file once, whole, and checks every checksum in it. What was read is put into the cache.

    Args:
      files: paths, sorted.
      console: where progress is shown, and what is wrong with an index on disk.
      fresh: whether to read every file again.
      check: is called while files are read, and may raise.

    Raises:
      UserError: when a file cannot be read, holds no sound record, or is written to meanwhile.
    """
    console = console or rich.console.Console(quiet=True)
    folders: dict[str, list[str]] = {}
    for path in files:
        folders.setdefault(os.path.dirname(path), []).append(path)
    known = {}
    for folder, inside in () if fresh else folders.items():
        known.update(tables.load(folder, inside, lambda text: console.print(text, markup=False)))
    missing = [path for path in files if path not in known]
    if missing:
        tables.check_cache(os.path.dirname(missing[0]))  # all are in one folder of the cache
        found: dict[str, FileRecords] = {}
        try:
            _scan_all(missing, console, found, check)
        except BaseException:  # what was read need not be read again
            with contextlib.suppress(UserError, GuardError):
                _add_to_cache(folders, found)
            raise
        _add_to_cache(folders, found)
        known.update(found)
    return Index(tuple(files), tuple(known[path] for path in files))


def _add_to_cache(folders: Mapping[str, Sequence[str]], found: Mapping[str, FileRecords]) -> None:
    for folder, files in folders.items():
        inside = {path: found[path] for path in files if path in found}
        if inside:
            tables.add_to_cache(folder, inside)


class _NotWanted(Exception):
    """Ends a scan of which nobody waits for the end."""


def _scan_all(
    files: Sequence[str],
    console: rich.console.Console,
    found: dict[str, FileRecords],
    check: Callable[[], None],
) -> None:
    """Scans files side by side, under a progress bar on a terminal, with a line at the end elsewhere.

    What is done is in `found`, by path, also when it ends with an error.
    """
    began, total = time.monotonic(), sum(os.path.getsize(path) for path in files)
    columns = (
        rich.progress.TextColumn('indexing {task.fields[files]} files'),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(),
        rich.progress.TransferSpeedColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    bar = rich.progress.Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with bar, concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        ended = threading.Event()

        def advance(size: int) -> None:
            if ended.is_set():
                raise _NotWanted
            bar.advance(task, size)

        task = bar.add_task('', total=total, files=f'{len(files):,}')
        tasks = [pool.submit(scan, path, advance) for path in files]
        try:
            waiting = set(tasks)
            while waiting:
                check()
                done, waiting = concurrent.futures.wait(waiting, CHECK_SECONDS, concurrent.futures.FIRST_EXCEPTION)
                for each in done:
                    each.result()
        finally:
            ended.set()
            pool.shutdown(cancel_futures=True)
            sound = (not each.cancelled() and not each.exception() for each in tasks)
            found.update({path: each.result() for path, each, ok in zip(files, tasks, sound, strict=True) if ok})
    seconds = time.monotonic() - began
    if seconds > QUIET_SECONDS:
        records = sum(len(each.sizes) for each in found.values())
        console.print(f'Indexed {len(files):,} files, {records:,} records, {total / 1e6:,.0f} MB in {seconds:.1f} s.')


def common_folder(files: Sequence[str]) -> pathlib.Path:
    """The deepest folder that holds all `files`, for shorter listings."""
    return pathlib.Path(os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in files]))
