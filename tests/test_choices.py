"""What is chosen for the user, and what is offered when a wish cannot be met."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctl.data import choices, shards
from ctl.errors import UserError
from tests.test_shards import counts_of_files


@given(st.integers(1, 500), st.integers(1, 5000), st.integers(1, 64), st.floats(1, 1e7), st.integers(1 << 20, 1 << 31))
def test_windows_take_no_more_memory_than_allowed_unless_they_hold_one_record(block, window, number, size, most):
    block_records, window_records = choices.fit_window(block, window, number, size, most)
    assert 1 <= block_records <= min(block, window_records) and window_records <= window
    held = choices.WINDOWS_HELD * number * window_records * size
    assert window_records == 1 or held <= most
    assert window_records == window or held + choices.WINDOWS_HELD * number * size > most


@given(
    counts_of_files,
    st.integers(1, 40),
    st.integers(1, 5),
    st.integers(0, 70),
    st.sampled_from(['auto', 'file', 'record']),
)
@settings(max_examples=300)
def test_chosen_shards_divide_the_batch_over_the_replicas_or_the_error_names_values_that_work(
    counts, per_replica, replicas, wanted, shard_by
):
    batch = per_replica * replicas
    try:
        number, by, why = choices.choose_shards(counts, batch, replicas, wanted, shard_by)
    except UserError as error:
        if 'data.logical_shards=' in str(error) and 'must divide' in str(error):
            for near in map(int, str(error).rpartition('take ')[2].rstrip('.').split(' or ')):
                assert batch % near == 0 and near % replicas == 0
        else:
            assert 'take ' in str(error) or 'use fewer replicas' in str(error)
        return
    assert batch % number == 0 and number % replicas == 0
    assert number == wanted or not wanted
    assert (by == shard_by or shard_by == 'auto') and why
    if by == 'file':
        assert number <= len(counts)
        assert shard_by == 'file' or choices.imbalance(counts, number) <= choices.MOST_IMBALANCE
    else:
        layout = shards.Layout(counts, batch, number, by, 0, 128, 1024)
        shares = [shard.records for shard in layout.shards]
        assert max(shares) - min(shares) <= 1


@given(st.integers(1, 400), st.integers(1, 8), st.integers(1, 4))
def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_that_do(batch, replicas, microbatches):
    unit = replicas * microbatches
    if batch % unit == 0:
        choices.check_batch(batch, replicas, microbatches)
        return
    with pytest.raises(UserError, match=f'global_batch_size={batch} ') as caught:
        choices.check_batch(batch, replicas, microbatches)
    offered = [int(size) for size in str(caught.value).rpartition('take ')[2].rstrip('.').split(' or ')]
    assert offered == [s for s in (batch - batch % unit, batch - batch % unit + unit) if s]


def test_a_batch_of_32_on_3_replicas_is_refused_with_30_or_33():  # C18
    with pytest.raises(UserError, match='train.global_batch_size=32 does not divide over 3 replicas: take 30 or 33'):
        choices.check_batch(32, 3, 1)
