"""The numbers of the sharding that the user may leave to the program, and what is said when a wish cannot be met."""

import numpy as np

from ctl.errors import UserError

MOST_SHARDS = 64
# Shares of whole files may differ by this much of the mean before runs of records are taken instead.
MOST_IMBALANCE = 0.10
# Of every shard there may be in memory: the window that is handed on, the next, and the blocks of the one after.
WINDOWS_HELD = 3


def fit_window(
    block_records: int, window_records: int, logical_shards: int, record_bytes: float, most_bytes: int
) -> tuple[int, int]:
    """Blocks and windows as wished, or smaller, so that the windows of all shards together take `most_bytes` at most.

    Args:
      block_records, window_records: the wishes.
      record_bytes: the mean size of a record.

    Returns:
      (records in a block, records in a window).
    """
    fitting = int(most_bytes / (WINDOWS_HELD * logical_shards * record_bytes))
    window = max(1, min(window_records, fitting))
    return min(block_records, window), window


def imbalance(counts: np.ndarray, logical_shards: int) -> float:
    """(largest share - smallest share) / mean share, when whole files are shared."""
    shares = [int(counts[s::logical_shards].sum()) for s in range(logical_shards)]
    return (max(shares) - min(shares)) / (sum(shares) / logical_shards)


def check_batch(global_batch_size: int, replicas: int, microbatches: int) -> None:
    """Raises UserError, with the nearest sizes that work, unless replicas x microbatches divides the global batch."""
    unit = replicas * microbatches
    if global_batch_size % unit:
        below = global_batch_size // unit * unit
        sizes = ' or '.join(str(size) for size in (below, below + unit) if size)
        over = f'{replicas} replicas' + (f' x {microbatches} microbatches' if microbatches > 1 else '')
        raise UserError(f'train.global_batch_size={global_batch_size} does not divide over {over}: take {sizes}.')


def choose_shards(
    counts: np.ndarray, global_batch_size: int, replicas: int, logical_shards: int = 0, shard_by: str = 'auto'
) -> tuple[int, str, str]:
    """The number of logical shards, what they are made of, and why.

    Args:
      counts: records in each of the sorted files.
      global_batch_size: a multiple of `replicas`.
      replicas: R.
      logical_shards: L, or 0 to choose the largest possible up to 64.
      shard_by: 'file', 'record', or 'auto' to take files where shares come out within 10 %.

    Returns:
      (L, 'file' or 'record', the reason in words).

    Raises:
      UserError: when the wishes cannot be met, with the nearest values that can.
    """
    files, records = len(counts), int(counts.sum())
    fitting = [n for n in range(1, global_batch_size + 1) if global_batch_size % n == 0 and n % replicas == 0]
    if logical_shards and logical_shards not in fitting:
        near = sorted(fitting, key=lambda n: abs(n - logical_shards))[:3]
        raise UserError(
            f'data.logical_shards={logical_shards} must divide train.global_batch_size={global_batch_size} and be a '
            f'multiple of the {replicas} replicas: take {" or ".join(map(str, sorted(near)))}.'
        )
    if shard_by != 'record':
        candidates = [n for n in fitting if n <= min(MOST_SHARDS, files)]
        chosen = logical_shards or max(candidates, default=0)
        if chosen and chosen <= files:
            uneven = imbalance(counts, chosen)
            if shard_by == 'file' or uneven <= MOST_IMBALANCE:
                return chosen, 'file', f'whole files; shares differ by {uneven:.1%}'
            reason = f'shares of whole files would differ by {uneven:.1%}'
        elif shard_by == 'file':
            wanted = f'data.logical_shards={logical_shards}' if logical_shards else f'{replicas} replicas'
            raise UserError(
                f'data.shard_by=file: {files} files cannot be shared over {wanted} with a global batch of '
                f'{global_batch_size}: take --config.data.shard_by=record, or write more files.'
            )
        else:
            chosen, reason = logical_shards, f'{files} files do not share over {replicas} replicas'
    else:
        chosen, reason = logical_shards, 'asked for'
    chosen = chosen or max((n for n in fitting if n <= min(MOST_SHARDS, records)), default=0)
    if not chosen or chosen > records:
        raise UserError(
            f'{records} records are too few for {chosen or replicas} shares: add data, or use fewer replicas.'
        )
    return chosen, 'record', f'runs of records ({reason}); shares differ by at most 1 record'
