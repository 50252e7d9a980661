"""The numbers of the sharding that the user may leave to the program, and what is said when a wish cannot be met."""

import math
from typing import NamedTuple

import numpy as np

from ctl.errors import UserError

# Shards that are chosen unasked.
MOST_SHARDS = 64
# Whole files are shares only where they make as many, or as many as records could: of few files, a global batch would
# mix few places, and more pipelines than files would each read what others read.
FEWEST_FILES = 8
# Of every shard there may be in memory: the window that is handed on, the next, and the blocks of the one after.
WINDOWS_HELD = 3


def fit_window(
    block_records: int, window_records: int, logical_shards: int, record_bytes: float, most_bytes: int
) -> tuple[int, int]:
    """Blocks and windows as wished, or smaller, so that the windows of all shards together take `most_bytes` at most.

    By the mean size of a record; and a window holds at least one.

    Args:
      block_records, window_records: the wishes.
      record_bytes: the mean size of a record.

    Returns:
      (records in a block, records in a window).
    """
    fitting = int(most_bytes / (WINDOWS_HELD * logical_shards * record_bytes))
    window = max(1, min(window_records, fitting))
    return min(block_records, window), window


def check_batch(global_batch_size: int, replicas: int, microbatches: int, begun: bool = False) -> None:
    """Raises UserError, with the nearest numbers that work, unless replicas x microbatches divides the global batch.

    A run that has `begun` keeps its batch, and goes on over another number of replicas.
    """
    unit = replicas * microbatches
    if not global_batch_size % unit:
        return
    over = f'{replicas} replicas' + (f' x {microbatches} microbatches' if microbatches > 1 else '')
    problem = f'train.global_batch_size={global_batch_size} does not divide over {over}'
    if not begun:
        below = global_batch_size // unit * unit
        sizes = [str(size) for size in (below, below + unit) if size]
        raise UserError(f'{problem}: take {" or ".join(sizes)}.')
    fitting = [n for n in range(1, global_batch_size + 1) if not global_batch_size % (n * microbatches)]
    near = ' or '.join(map(str, [n for n in fitting if n < replicas][-1:] + [n for n in fitting if n > replicas][:1]))
    remedy = f'go on over {near} (devices.replicas, or workers)' if near else 'take --config.train.microbatches=1'
    raise UserError(f'{problem}. The run in this workdir keeps its batch: {remedy}.')


class Choice(NamedTuple):
    """How the records are shared.

    Attributes:
      logical_shards: L, the number of shares.
      shard_by: what a share is: 'file' for whole files, 'record' for a run of records.
      why: the reason, and by how much shares differ, in words.
    """

    logical_shards: int
    shard_by: str
    why: str


def choose_shards(
    counts: np.ndarray,
    global_batch_size: int,
    logical_shards: int = 0,
    shard_by: str = 'auto',
    compressed: bool = False,
) -> Choice:
    """How many logical shards there are, and what they are made of; from files and batch alone, on any hardware.

    'auto' takes whole files where there are enough, and their shares differ by at most one record, so that an epoch is
    equally long in every shard; else runs of records, whose shares always do. Compressed files stay whole: they can
    only be read from their beginning on, and a run that begins inside of one would inflate all before it.

    Args:
      counts: records in each of the sorted files.
      global_batch_size: B.
      logical_shards: L, or 0 to choose the largest possible up to 64.
      shard_by: 'file', 'record' or 'auto'.
      compressed: whether any file is.

    Raises:
      UserError: when the wishes cannot be met, with values that can.
    """
    numbers = _shard_numbers(global_batch_size, logical_shards)
    by_file = max((n for n in numbers if n <= len(counts)), default=0)
    by_record = max((n for n in numbers if n <= counts.sum()), default=0)
    if not max(by_file, by_record):
        raise UserError(
            f'{counts.sum()} records are too few for data.logical_shards={logical_shards}: add data, or take a smaller '
            'number, or --config.data.logical_shards=0, which chooses one.'
        )
    if shard_by == 'file' and not by_file:
        raise UserError(
            f'data.shard_by=file: {len(counts)} files are too few for data.logical_shards={logical_shards}: take '
            '--config.data.shard_by=record, or write more files.'
        )
    if shard_by == 'file':
        return _whole_files(counts, by_file, 'asked for, or kept since the first start')
    if shard_by == 'record':
        return _runs_of_records(counts, by_record, 'asked for, or kept since the first start', compressed)
    if not by_file:
        reason = f'{len(counts)} files are too few for data.logical_shards={logical_shards}'
        return _runs_of_records(counts, by_record, reason, compressed)
    if compressed:
        return _whole_files(counts, by_file, 'some are compressed, and can only be read from their beginning on')
    if _difference(file_shares(counts, by_file)) > 1:
        uneven = _difference_text(file_shares(counts, by_file))
        return _runs_of_records(counts, by_record, f'shares of whole files would differ by {uneven}', compressed)
    if by_file < min(FEWEST_FILES, by_record):
        reason = f'whole files would make {by_file} share{"s" if by_file > 1 else ""}'
        return _runs_of_records(counts, by_record, reason, compressed)
    return _whole_files(counts, by_file, 'they share evenly')


def file_shares(counts: np.ndarray, logical_shards: int) -> np.ndarray:
    """The records of each shard where whole files are shared, int64 [L]."""
    return np.array([counts[s::logical_shards].sum() for s in range(logical_shards)], np.int64)


def _shard_numbers(global_batch_size: int, logical_shards: int) -> list[int]:
    """The numbers of shards to choose from: the one asked for, else all up to 64 that divide the batch.

    Raises:
      UserError: when the one asked for does not divide it.
    """
    small = [n for n in range(1, math.isqrt(global_batch_size) + 1) if global_batch_size % n == 0]
    fitting = sorted({*small, *(global_batch_size // n for n in small)})
    if not logical_shards:
        return [n for n in fitting if n <= MOST_SHARDS]
    if logical_shards in fitting:
        return [logical_shards]
    near = ' or '.join(map(str, sorted(sorted(fitting, key=lambda n: abs(n - logical_shards))[:3])))
    raise UserError(
        f'data.logical_shards={logical_shards} must divide train.global_batch_size={global_batch_size}: take {near}.'
    )


def _whole_files(counts: np.ndarray, logical_shards: int, reason: str) -> Choice:
    shares = file_shares(counts, logical_shards)
    epochs = ', and a smaller one begins its next epoch so much earlier' if _difference(shares) > 1 else ''
    return Choice(
        logical_shards, 'file', f'whole files ({reason}); shares differ by {_difference_text(shares)}{epochs}'
    )


def _runs_of_records(counts: np.ndarray, logical_shards: int, reason: str, compressed: bool) -> Choice:
    shares = np.diff(np.arange(logical_shards + 1) * int(counts.sum()) // logical_shards)
    inflated = '; one that begins inside of a compressed file reads all before it too' if compressed else ''
    return Choice(
        logical_shards, 'record', f'runs of records ({reason}); shares differ by {_difference_text(shares)}{inflated}'
    )


def _difference(shares: np.ndarray) -> int:
    return int(shares.max() - shares.min())


def _difference_text(shares: np.ndarray) -> str:
    """'12 records (0.3%)': between the largest and the smallest share, and as a part of the mean."""
    difference = _difference(shares)
    return f'{difference:,} record{"" if difference == 1 else "s"} ({difference / shares.mean():.1%})'
