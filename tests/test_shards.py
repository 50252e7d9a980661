"""The sharding arithmetic: for any files, batch, replicas and seed."""

import itertools

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ctl.data import choices, shards
from ctl.errors import UserError

# A few files mostly; sometimes as many as there may be replicas.
counts_of_files = st.builds(
    lambda counts, times: np.array(counts * times, np.int64),
    st.lists(st.integers(1, 60), min_size=1, max_size=12),
    st.sampled_from([1, 1, 1, 100]),
)


def divisors(number):
    return [n for n in range(1, number + 1) if number % n == 0]


# Some that many numbers of replicas divide, up to a thousand.
batches = st.integers(1, 40) | st.sampled_from([64, 96, 120, 128, 720, 1000, 1024, 2520, 3000])


@st.composite
def hardware(draw, global_batch_size):
    """(replicas, pipelines): any that can run the batch, up to 1,024."""
    replicas = draw(st.sampled_from([n for n in divisors(global_batch_size) if n <= 1024]))
    return replicas, draw(st.sampled_from(divisors(replicas)))


@st.composite
def layouts(draw, shuffled=True):
    """A layout that `choose_shards` allows."""
    counts, global_batch_size = draw(counts_of_files), draw(batches)
    shard_by = draw(st.sampled_from(['auto', 'file', 'record']))
    wanted = draw(st.sampled_from([0, 0, *divisors(global_batch_size)]))
    try:
        number, by, _ = choices.choose_shards(counts, global_batch_size, wanted, shard_by)
    except UserError:
        assume(False)
    seed = draw(st.integers(0, 2**31 - 1)) if shuffled else None
    block, window = draw(st.integers(1, 9)), draw(st.integers(1, 40))
    breaks = np.array(sorted(draw(st.sets(st.integers(0, int(counts.sum()) - 1), max_size=5))), np.int64)
    sequential = np.array(draw(st.lists(st.booleans(), min_size=len(counts), max_size=len(counts))))
    return shards.Layout(counts, global_batch_size, number, by, seed, block, window, breaks, sequential)


@given(layouts(), st.integers(0, 3))
@settings(max_examples=20)
def test_every_epoch_of_the_shards_together_is_every_record_once(layout, epoch):
    read = [shard.take(epoch * shard.records, shard.records) for shard in layout.shards]
    assert np.array_equal(np.sort(np.concatenate(read)), np.arange(layout.counts.sum()))


@given(layouts(), st.data())
def test_the_parts_of_pipelines_are_every_row_of_a_global_batch_once(layout, data):
    _, pipelines = data.draw(hardware(layout.global_batch_size))
    rows = []
    for pipeline in range(pipelines):
        mine, start, stop = layout.part(pipeline, pipelines)
        assert stop - start == layout.global_batch_size // pipelines
        own = [(shard.number, row) for shard in mine for row in range(layout.share)]
        assert start < layout.share and stop > len(own) - layout.share, 'a shard is read for nothing'
        rows += own[start:stop]
    assert sorted(rows) == list(itertools.product(range(layout.logical_shards), range(layout.share)))


@given(layouts(), st.data())
def test_shards_are_read_once_where_pipelines_divide_them_and_else_by_all_that_need_them(layout, data):
    _, pipelines = data.draw(hardware(layout.global_batch_size))
    times = layout.times_read(pipelines)
    assert (times == 1) == (layout.logical_shards % pipelines == 0)
    assert times <= 1 + (pipelines - 1) / layout.logical_shards


@given(layouts(), st.data())
@settings(max_examples=20)
def test_pipeline_p_of_n_reads_exactly_files_p_n_where_pipelines_divide_the_shards(layout, data):
    assume(layout.shard_by == 'file')
    pipelines = data.draw(st.sampled_from(divisors(layout.logical_shards)))
    file_of = np.repeat(np.arange(len(layout.counts)), layout.counts)
    for pipeline in {0, pipelines // 2, pipelines - 1}:
        mine = layout.part(pipeline, pipelines).shards
        read = {int(f) for shard in mine for f in file_of[shard.take(0, shard.records)]}
        assert read == set(range(len(layout.counts))[pipeline::pipelines])


@given(layouts(), st.integers(0, 200))
def test_any_position_is_found_without_reading_what_comes_before(layout, position):
    shard = layout.shards[-1]
    assert np.array_equal(shard.take(position, 12), shard.take(0, position + 12)[position:])


@given(layouts(), st.integers(0, 10**9), st.data())
def test_a_global_batch_is_the_same_on_any_replicas_and_pipelines_that_divide_it(layout, step, data):
    expected = np.sort(layout.replica_records(step, 1, 1)[0])
    replicas, pipelines = data.draw(hardware(layout.global_batch_size))
    fed = layout.replica_records(step, replicas, pipelines)
    assert [len(records) for records in fed] == [layout.global_batch_size // replicas] * replicas
    assert np.array_equal(np.sort(np.concatenate(fed)), expected)


@given(layouts(shuffled=False))
def test_without_a_seed_records_come_in_the_order_of_the_files(layout):
    for shard in layout.shards:
        read = shard.take(0, shard.records)
        assert np.array_equal(read, np.sort(read))


@given(layouts())
def test_blocks_never_cross_a_damaged_record(layout):
    for shard in layout.shards:
        for start, count in zip(shard.starts, shard.counts, strict=True):
            assert not np.any((layout.breaks > start) & (layout.breaks < start + count))


@given(layouts(), st.integers(0, 5))
@settings(max_examples=20)
def test_a_compressed_file_is_read_from_its_beginning_on_once_an_epoch(layout, epoch):
    file_of = np.repeat(np.arange(len(layout.counts)), layout.counts)
    for shard in layout.shards:
        windows = [shard.window(epoch * shard.windows + w) for w in range(shard.windows)]
        starts = np.concatenate([window.starts for window in windows])
        files = file_of[starts]
        for file in np.unique(files[layout.sequential[files]]):
            places = np.flatnonzero(files == file)
            assert np.array_equal(places, np.arange(places[0], places[0] + len(places)))
            assert np.all(np.diff(starts[places]) > 0)


@given(layouts())
@settings(max_examples=20)
def test_blocks_never_cross_files_and_windows_hold_what_they_may(layout):
    file_of = np.repeat(np.arange(len(layout.counts)), layout.counts)
    for shard in layout.shards:
        assert np.array_equal(file_of[shard.starts], file_of[shard.starts + shard.counts - 1])
        assert shard.counts.max() <= layout.block_records
        for w in range(shard.windows):
            assert len(shard.window(w).order) <= max(layout.window_records, layout.block_records)


@given(st.integers(1, 300), st.integers(0, 2**31), st.integers(0, 10))
def test_a_permutation_is_one_and_follows_from_its_key(n, seed, epoch):
    drawn = shards.permutation(n, seed, epoch)
    assert np.array_equal(np.sort(drawn), np.arange(n))
    assert np.array_equal(drawn, shards.permutation(n, seed, epoch))


def test_permutations_are_pinned_so_that_no_release_changes_the_order_of_a_run():
    assert shards.permutation(8, 7, 0, 1).tolist() == [2, 5, 0, 1, 6, 3, 4, 7]


def test_over_many_keys_every_place_of_a_permutation_is_uniform():
    n, draws = 10, 5000
    places = np.array([shards.permutation(n, key) for key in range(draws)])
    observed = np.array([[np.sum(places[:, place] == value) for value in range(n)] for place in range(n)])
    chi_square = np.sum((observed - draws / n) ** 2 / (draws / n))
    assert chi_square < 113.5  # 1 % point for (10 - 1)^2 = 81 degrees of freedom
