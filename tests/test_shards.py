"""The sharding arithmetic: for any files, batch, replicas and seed."""

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
replicas_of_a_run = st.integers(1, 5) | st.integers(1, 1024) | st.sampled_from([64, 65, 96, 128, 1000, 1024])


@st.composite
def layouts(draw, shuffled=True):
    """A layout that `choose_shards` allows, and the replicas it was chosen for."""
    counts = draw(counts_of_files)
    replicas = draw(replicas_of_a_run)
    global_batch_size = replicas * draw(st.integers(1, 8))
    shard_by = draw(st.sampled_from(['auto', 'file', 'record']))
    wanted = draw(st.sampled_from([0, 0, global_batch_size]))
    try:
        number, by, _ = choices.choose_shards(counts, global_batch_size, replicas, wanted, shard_by)
    except UserError:
        assume(False)
    seed = draw(st.integers(0, 2**31 - 1)) if shuffled else None
    block, window = draw(st.integers(1, 9)), draw(st.integers(1, 40))
    breaks = np.array(sorted(draw(st.sets(st.integers(0, int(counts.sum()) - 1), max_size=5))), np.int64)
    sequential = np.array(draw(st.lists(st.booleans(), min_size=len(counts), max_size=len(counts))))
    layout = shards.Layout(counts, global_batch_size, number, by, seed, block, window, breaks, sequential)
    return layout, replicas


def divisors(number):
    return [n for n in range(1, number + 1) if number % n == 0]


@given(layouts(), st.integers(0, 3))
@settings(max_examples=20)
def test_every_epoch_of_the_shards_together_is_every_record_once(drawn, epoch):
    layout, _ = drawn
    read = [shard.take(epoch * shard.records, shard.records) for shard in layout.shards]
    assert np.array_equal(np.sort(np.concatenate(read)), np.arange(layout.counts.sum()))


@given(layouts())
def test_pipelines_partition_the_shards_for_every_number_of_pipelines_that_divides_them(drawn):
    layout, _ = drawn
    for pipelines in divisors(layout.logical_shards):
        carried = [s.number for p in range(pipelines) for s in layout.pipeline_shards(p, pipelines)]
        assert sorted(carried) == list(range(layout.logical_shards))


@given(layouts())
@settings(max_examples=20)
def test_pipeline_p_of_n_reads_exactly_files_p_n(drawn):
    layout, replicas = drawn
    assume(layout.shard_by == 'file')
    file_of = np.repeat(np.arange(len(layout.counts)), layout.counts)
    for pipeline in {0, replicas // 2, replicas - 1}:
        mine = layout.pipeline_shards(pipeline, replicas)
        read = {int(f) for shard in mine for f in file_of[shard.take(0, shard.records)]}
        assert read == set(range(len(layout.counts))[pipeline::replicas])


@given(layouts(), st.integers(0, 200))
def test_any_position_is_found_without_reading_what_comes_before(drawn, position):
    layout, _ = drawn
    shard = layout.shards[-1]
    assert np.array_equal(shard.take(position, 12), shard.take(0, position + 12)[position:])


@given(layouts(), st.integers(0, 10**9), st.data())
def test_a_global_batch_is_the_same_on_any_replicas_and_pipelines(drawn, step, data):
    layout, _ = drawn
    expected = np.sort(layout.replica_records(step, 1, 1)[0])
    replicas = data.draw(st.sampled_from(divisors(layout.logical_shards)))
    pipelines = data.draw(st.sampled_from(divisors(replicas)))
    fed = layout.replica_records(step, replicas, pipelines)
    assert [len(records) for records in fed] == [layout.global_batch_size // replicas] * replicas
    assert np.array_equal(np.sort(np.concatenate(fed)), expected)


@given(layouts(shuffled=False))
def test_without_a_seed_records_come_in_the_order_of_the_files(drawn):
    layout, _ = drawn
    for shard in layout.shards:
        read = shard.take(0, shard.records)
        assert np.array_equal(read, np.sort(read))


@given(layouts())
def test_blocks_never_cross_a_damaged_record(drawn):
    layout, _ = drawn
    for shard in layout.shards:
        for start, count in zip(shard.starts, shard.counts, strict=True):
            assert not np.any((layout.breaks > start) & (layout.breaks < start + count))


@given(layouts(), st.integers(0, 5))
@settings(max_examples=20)
def test_a_compressed_file_is_read_from_its_beginning_on_once_an_epoch(drawn, epoch):
    layout, _ = drawn
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
def test_blocks_never_cross_files_and_windows_hold_what_they_may(drawn):
    layout, _ = drawn
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
