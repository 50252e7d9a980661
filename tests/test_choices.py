"""What is chosen for the user, and what is offered when a wish cannot be met."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctl.data import choices, shards
from ctl.errors import UserError
from tests.test_shards import batches, counts_of_files, divisors


@given(
    st.integers(1, 500), st.integers(1, 5000), st.integers(1, 1024), st.floats(1, 1e7), st.integers(1 << 20, 1 << 31)
)
def test_windows_take_no_more_memory_than_allowed_unless_they_hold_one_record(block, window, number, size, most):
    block_records, window_records = choices.fit_window(block, window, number, size, most)
    assert 1 <= block_records <= min(block, window_records) and window_records <= window
    held = choices.WINDOWS_HELD * number * window_records * size
    assert window_records == 1 or held <= most
    assert window_records == window or held + choices.WINDOWS_HELD * number * size > most


@given(
    counts_of_files,
    batches,
    st.integers(0, 70) | st.sampled_from([128, 192, 512, 1024]),
    st.sampled_from(['auto', 'file', 'record']),
    st.booleans(),
)
@settings(max_examples=500)
def test_chosen_shards_are_as_wished_and_as_equal_as_they_can_be_or_the_refusal_names_what_works(
    counts, batch, wanted, shard_by, compressed
):
    try:
        number, by, why = choices.choose_shards(counts, batch, wanted, shard_by, compressed)
    except UserError as error:
        check_advice(str(error), counts, batch, wanted, shard_by, compressed)
        return
    allowed = [wanted] if wanted else [n for n in divisors(batch) if n <= choices.MOST_SHARDS]
    by_file = max((n for n in allowed if n <= len(counts)), default=0)
    by_record = max((n for n in allowed if n <= counts.sum()), default=0)
    assert number == (by_file if by == 'file' else by_record)
    layout = shards.Layout(counts, batch, number, by, 0, 128, 1024)
    difference = np.ptp([shard.records for shard in layout.shards])
    assert f'shares differ by {difference:,} record' in why
    if by == 'record':
        assert difference <= 1
    enough = by_file >= min(choices.FEWEST_FILES, by_record)
    if shard_by != 'auto':
        assert by == shard_by
    elif by == 'file':
        assert compressed or (difference <= 1 and enough)
    elif by_file:
        assert not compressed and (np.ptp(choices.file_shares(counts, by_file)) > 1 or not enough)


def check_advice(refusal, counts, batch, wanted, shard_by, compressed):
    """Does what a refusal says, each way that it names."""
    if refusal.startswith('data.shard_by=file'):
        assert len(counts) < wanted
        assert choices.choose_shards(counts, batch, wanted, 'record', compressed).shard_by == 'record'
        more = np.resize(counts, wanted)
        assert choices.choose_shards(more, batch, wanted, 'file', compressed).shard_by == 'file'
    elif 'records are too few' in refusal:
        assert counts.sum() < wanted
        assert choices.choose_shards(counts, batch, 0, shard_by, compressed)
    else:
        assert refusal.startswith(f'data.logical_shards={wanted} must divide train.global_batch_size={batch}: take ')
        assert batch % wanted
        for number in map(int, refusal.rpartition('take ')[2].rstrip('.').split(' or ')):
            assert batch % number == 0


EVEN, UNEVEN = np.full(8, 1000), np.array([1000] * 7 + [998])


@pytest.mark.parametrize(
    'counts, compressed, shard_by, chosen',
    [
        (EVEN, False, 'auto', (8, 'file', 'whole files (they share evenly); shares differ by 0 records (0.0%)')),
        (UNEVEN + np.arange(8) // 7, False, 'auto', (8, 'file', 'whole files (they share evenly); shares differ by 1')),
        (UNEVEN, False, 'auto', (64, 'record', 'runs of records (shares of whole files would differ by 2 records (')),
        (UNEVEN, True, 'auto', (8, 'file', 'whole files (some are compressed, and can only be read from their begin')),
        (UNEVEN, False, 'file', (8, 'file', 'a smaller one begins its next epoch so much earlier')),
        (EVEN, True, 'record', (64, 'record', 'one that begins inside of a compressed file reads all before it too')),
        (EVEN[:4], False, 'auto', (64, 'record', 'runs of records (whole files would make 4 shares)')),
        (EVEN[:1], False, 'auto', (64, 'record', 'runs of records (whole files would make 1 share)')),
        (EVEN[:1], True, 'auto', (1, 'file', 'some are compressed')),
    ],
)
def test_whole_files_are_taken_unasked_where_they_are_many_and_share_evenly_or_one_is_compressed(
    counts, compressed, shard_by, chosen
):
    number, by, why = choices.choose_shards(counts, 64, shard_by=shard_by, compressed=compressed)
    assert (number, by) == chosen[:2] and chosen[2] in why


def test_whole_files_are_taken_of_few_where_records_would_make_no_more_shares():
    assert choices.choose_shards(EVEN[:2], 2)[:2] == (2, 'file')
    assert choices.choose_shards(EVEN[:4], 8, 4)[:2] == (4, 'file')


@given(st.integers(1, 1 << 16), st.integers(1, 1024), st.integers(1, 4))
def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_that_do(batch, replicas, microbatches):
    unit = replicas * microbatches
    if batch % unit == 0:
        choices.check_batch(batch, replicas, microbatches)
        return
    with pytest.raises(UserError, match=f'global_batch_size={batch} ') as caught:
        choices.check_batch(batch, replicas, microbatches)
    offered = [int(size) for size in str(caught.value).rpartition('take ')[2].rstrip('.').split(' or ')]
    assert offered == [s for s in (batch - batch % unit, batch - batch % unit + unit) if s]


@given(st.integers(1, 1 << 16), st.integers(1, 1024), st.integers(1, 4))
def test_a_run_that_has_begun_keeps_its_batch_and_is_told_the_nearest_replicas(batch, replicas, microbatches):
    if batch % (replicas * microbatches) == 0:
        choices.check_batch(batch, replicas, microbatches, begun=True)
        return
    with pytest.raises(UserError, match=f'global_batch_size={batch} ') as caught:
        choices.check_batch(batch, replicas, microbatches, begun=True)
    told = str(caught.value).partition('keeps its batch: ')[2]
    offered = [int(number) for number in re.findall(r'\d+', told.partition('(')[0])]
    if 'microbatches=1' in told:
        assert batch % microbatches
    for number in [] if batch % microbatches else offered:
        choices.check_batch(batch, number, microbatches, begun=True)
        between = range(min(number, replicas) + 1, max(number, replicas))
        assert all(batch % (each * microbatches) for each in between)


def test_a_batch_of_32_on_3_replicas_is_refused_with_30_or_33():  # C18
    with pytest.raises(UserError, match='train.global_batch_size=32 does not divide over 3 replicas: take 30 or 33'):
        choices.check_batch(32, 3, 1)
