"""Which record goes where, and when: pure arithmetic on record numbers, without TensorFlow.

Records are numbered from 0 through the sorted files. The data is cut into L logical shards, whatever the hardware:

    by file      shard s owns files[s::L]
    by record    shard s owns a run of record numbers; the runs differ by at most one record

and every shard puts global_batch / L of its records into every global batch. It reads each of them once before any
again: that is its epoch. Whole files may make shares of different sizes; then the smaller begin their next epoch
earlier (unasked, `choices` takes them only where that is one record, or a file is compressed).

Where the n input pipelines divide L, pipeline p carries the shards s with s % n == p: with whole files exactly
files[p::n]. Where they do not, pipeline p carries the rows [p B/n, (p+1) B/n) of the global batch of B, in which the
shards come one after the other: a shard that straddles two pipelines is read by both, and each takes its part. So the
records of a step are a function of the files, the seed, L, the global batch and the step alone: not of replicas,
workers, or time.

Inside a shard, an epoch is its blocks (runs of neighbouring records in one file) in an order drawn for the epoch, a few
blocks making a window, and the records of a window in an order drawn for the window:

    file      | block | block | block | block | block | block |
    epoch     | block 4 | block 0 || block 5 | block 2 || ...      (seed, shard, epoch)
    window      4b 0c 4a 4d 0a 0b  5c 2a 2d ...                    (seed, shard, epoch, window)

A compressed file can only be read from its beginning on: the blocks that a shard has of it stay together and in order,
and take their place in the epoch as one.
"""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np


def permutation(n: int, *key: int) -> np.ndarray:
    """A permutation of 0..n-1, int64 [n], that is a function of `key` alone, on every machine and version of NumPy.

    The numbers are sorted by a hash: the SplitMix64 generator (Steele, Lea and Flood 2014, "Fast splittable
    pseudorandom number generators", figure 17) started from the hashed key.
    """
    state = np.zeros(1, np.uint64)
    for part in key:
        state = _mix(state + _GOLDEN + np.uint64(part))
    return np.argsort(_mix(state + _GOLDEN * np.arange(1, n + 1, dtype=np.uint64)), kind='stable')


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser, on uint64 arrays; multiplication wraps."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@dataclasses.dataclass(frozen=True)
class Window:
    """Records that are read together and then shuffled.

    Attributes:
      starts: the number of the first record of each block, int64 [blocks].
      counts: the records in each block, int64 [blocks].
      order: places in the blocks laid end to end, int64 [records]: the order in which they leave the window.
    """

    starts: np.ndarray
    counts: np.ndarray
    order: np.ndarray

    @property
    def records(self) -> np.ndarray:
        """Record numbers in the order they leave the window, int64 [records]."""
        return np.concatenate([np.arange(s, s + c) for s, c in zip(self.starts, self.counts, strict=True)])[self.order]


class Place(NamedTuple):
    """A place in a shard: the number of the window that holds it, and the records of that window before it."""

    window: int
    skip: int


class Shard:
    """One logical shard: an endless sequence of windows, epoch after epoch, in which any position can be found.

    Attributes:
      number: which shard it is.
      starts, counts: its blocks, int64 [blocks].
      records: the records in one epoch.
      windows: the windows in one epoch.
    """

    def __init__(
        self,
        number: int,
        starts: np.ndarray,
        counts: np.ndarray,
        blocks_per_window: int,
        seed: int | None,
        groups: np.ndarray | None = None,
    ):
        """`seed` None keeps the records in the order of the files.

        `groups`, int64 [blocks], counts up from 0: blocks of one group stay together and in order; None for none.
        """
        self.number = number
        self.starts, self.counts = starts, counts
        self._groups = np.arange(len(counts)) if groups is None else groups
        self.records = int(counts.sum())
        self.windows = -(-len(counts) // blocks_per_window)
        self._blocks_per_window, self._seed = blocks_per_window, seed
        self._blocks_of_epoch = functools.lru_cache(maxsize=2)(self._draw_blocks)

    def _draw_blocks(self, epoch: int) -> np.ndarray:
        if self._seed is None:
            return np.arange(len(self.counts))
        place = np.argsort(permutation(int(self._groups[-1]) + 1, self._seed, self.number, epoch))
        return np.argsort(place[self._groups], kind='stable')

    def window(self, index: int) -> Window:
        """Window `index` of the endless sequence: index // windows is its epoch."""
        epoch, within = divmod(index, self.windows)
        first = within * self._blocks_per_window
        blocks = self._blocks_of_epoch(epoch)[first : first + self._blocks_per_window]
        counts = self.counts[blocks]
        size = int(counts.sum())
        order = np.arange(size) if self._seed is None else permutation(size, self._seed, self.number, epoch, within)
        return Window(self.starts[blocks], counts, order)

    def locate(self, position: int) -> Place:
        """Where the shard's record number `position` is, counted through all epochs."""
        epoch, within = divmod(position, self.records)
        counts = self.counts[self._blocks_of_epoch(epoch)]
        firsts = np.concatenate([[0], np.cumsum(counts)])[:: self._blocks_per_window]
        window = int(np.searchsorted(firsts[: self.windows], within, side='right')) - 1
        return Place(epoch * self.windows + window, int(within - firsts[window]))

    def take(self, position: int, n: int) -> np.ndarray:
        """The `n` record numbers from `position` on, int64 [n]."""
        index, skip = self.locate(position)
        taken, have = [], 0
        while have < n:
            taken.append(self.window(index).records[skip:])
            have += len(taken[-1])
            index, skip = index + 1, 0
        return np.concatenate(taken)[:n]


class Part(NamedTuple):
    """What an input pipeline carries of every global batch.

    Attributes:
      shards: those that it reads.
      start, stop: its rows [start, stop) of what these put into a global batch, one after the other.
    """

    shards: tuple[Shard, ...]
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """How records are shared and ordered.

    Attributes:
      counts: records in each of the sorted files, int64 [files].
      global_batch_size: examples in one step.
      logical_shards: L.
      shard_by: 'file' or 'record'.
      seed: of all orders; None for the order of the files.
      block_records: records in a block, at most.
      window_records: records shuffled together, at most, in whole blocks and at least one.
      breaks: records, in order, that no block may reach across from the one before, int64 [n].
      sequential: which files must be read from their beginning on, bool [files]; None for none.
      batches_per_step: global batches that one step reads, one after the other.
    """

    counts: np.ndarray
    global_batch_size: int
    logical_shards: int
    shard_by: str
    seed: int | None
    block_records: int
    window_records: int
    breaks: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))
    sequential: np.ndarray | None = None
    batches_per_step: int = 1

    @property
    def share(self) -> int:
        """Records that each shard puts into each global batch."""
        return self.global_batch_size // self.logical_shards

    def position(self, step: int, batch: int = 0) -> int:
        """How many records of each shard come before global batch `batch` of step `step`."""
        return (step * self.batches_per_step + batch) * self.share

    @functools.cached_property
    def shards(self) -> tuple[Shard, ...]:
        return tuple(self._make_shard(s) for s in range(self.logical_shards))

    def _make_shard(self, s: int) -> Shard:
        starts, counts = cut_blocks(self._runs(s), self.block_records, self.breaks)
        groups = None
        if self.sequential is not None and self.sequential.any():
            files = np.searchsorted(self._ends, starts, side='right')
            joined = (files[1:] == files[:-1]) & self.sequential[files[1:]]
            groups = np.concatenate([np.zeros(1, np.int64), np.cumsum(~joined)])
        return Shard(s, starts, counts, max(1, self.window_records // self.block_records), self.seed, groups)

    @functools.cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self.counts)

    def _runs(self, s: int) -> np.ndarray:
        """[start, end) runs of record numbers that shard `s` owns, each within one file, int64 [runs, 2]."""
        files = np.stack([self._ends - self.counts, self._ends], axis=1)
        if self.shard_by == 'file':
            return files[s :: self.logical_shards]
        total = int(self._ends[-1])
        runs = np.clip(files, total * s // self.logical_shards, total * (s + 1) // self.logical_shards)
        return runs[runs[:, 0] < runs[:, 1]]

    def part(self, pipeline: int, pipelines: int) -> Part:
        """What input pipeline `pipeline` of `pipelines`, which divide the global batch, carries."""
        rows, share = self.global_batch_size // pipelines, self.share
        if self.logical_shards % pipelines == 0:
            return Part(self.shards[pipeline::pipelines], 0, rows)
        first = pipeline * rows // share
        start = pipeline * rows - first * share
        return Part(self.shards[first : first - (start + rows) // -share], start, start + rows)

    def times_read(self, pipelines: int) -> float:
        """How often a shard is read by all `pipelines` together, on average: 1 where they divide the shards."""
        return sum(len(self.part(p, pipelines).shards) for p in range(pipelines)) / self.logical_shards

    def replica_records(self, step: int, replicas: int, pipelines: int, batch: int = 0) -> list[np.ndarray]:
        """The record numbers that each replica is fed in global batch `batch` of `step`.

        `replicas` arrays, int64 [global_batch / replicas].
        """
        shares = [shard.take(self.position(step, batch), self.share) for shard in self.shards]
        fed = []
        for pipeline in range(pipelines):
            mine, start, stop = self.part(pipeline, pipelines)
            records = np.concatenate([shares[shard.number] for shard in mine])[start:stop]
            fed.extend(np.split(records, replicas // pipelines))
        return fed


def runs_of(numbers: np.ndarray, firsts: np.ndarray) -> np.ndarray:
    """Neighbouring records of one file together: [start, end) runs, int64 [runs, 2].

    Args:
      numbers: of the records, in order, int64 [n].
      firsts: the number of the first record of each file, int64 [files or more].
    """
    files = np.searchsorted(firsts, numbers, side='right')
    begins = np.flatnonzero((np.diff(numbers, prepend=-2) != 1) | (np.diff(files, prepend=-1) != 0))
    last = np.append(begins[1:], len(numbers)) - 1
    return np.stack([numbers[begins], numbers[last] + 1], axis=1)


def cut_blocks(runs: np.ndarray, block_records: int, breaks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cuts [start, end) runs, int64 [runs, 2], at `breaks` and then into blocks.

    Returns:
      The blocks' first record numbers, and their counts, both int64 [blocks].
    """
    run_of = np.searchsorted(runs[:, 0], breaks, side='right') - 1
    inside = breaks[(breaks > runs[run_of, 0]) & (breaks < runs[run_of, 1])]
    starts, ends = np.sort(np.concatenate([runs[:, 0], inside])), np.sort(np.concatenate([runs[:, 1], inside]))
    blocks = -(-(ends - starts) // block_records)
    within = np.arange(blocks.sum()) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    starts = np.repeat(starts, blocks) + within * block_records
    return starts, np.minimum(np.repeat(ends, blocks) - starts, block_records)
