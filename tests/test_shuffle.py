"""How well records mix: what is uniform, and what is nearly so, in figures."""

import numpy as np
import pytest

from ctl.config import BASE
from ctl.data import choices, shards
from tools import bench_shuffle

BLOCK, WINDOW = (BASE['data'][key].default for key in ('block_records', 'window_records'))


def one_percent_point(freedom):
    """Of the chi-square distribution: Wilson and Hilferty 1931, "The distribution of chi-square"."""
    return freedom * (1 - 2 / (9 * freedom) + 2.3263 * np.sqrt(2 / (9 * freedom))) ** 3


def chi_square(observed, expected):
    return float(np.sum((observed - expected) ** 2 / expected))


def make_shard(records, block, window, number=0):
    layout = shards.Layout(np.array([records]), 1, 1, 'file', 11, block, window)
    return layout.shards[number]


@pytest.mark.parametrize(
    'records, block, window', [(60, 4, 12), pytest.param(64, 1, 8, marks=pytest.mark.slow), (48, 6, 48)]
)
def test_over_many_epochs_every_place_of_every_record_is_as_likely(records, block, window):
    shard, epochs = make_shard(records, block, window), 4000
    order = shard.take(0, epochs * records).reshape(epochs, records)
    places = np.zeros([records, records], int)
    for place in range(records):
        places[:, place] = np.bincount(order[:, place], minlength=records)
    # A permutation's rows and columns have fixed sums; the records of a block share a window, hence fewer free counts.
    one_record = [chi_square(places[record], epochs / records) for record in range(records)]
    assert np.mean(np.array(one_record) > one_percent_point(records - 1)) <= 0.05
    assert abs(np.mean(one_record) - (records - 1)) < 4


def test_the_blocks_of_a_window_come_from_the_whole_shard():
    """Each block is as likely in each window, and two blocks share one as often as any others."""
    shard, epochs, blocks, per_window = make_shard(160, 4, 16), 3000, 40, 4
    in_window = np.zeros([blocks, shard.windows], int)
    together = np.zeros([blocks, blocks], int)
    for window in range(epochs * shard.windows):
        chosen = shard.window(window).starts // 4
        in_window[chosen, window % shard.windows] += 1
        together[np.ix_(chosen, chosen)] += 1
    expected = epochs / shard.windows
    assert chi_square(in_window, expected) < one_percent_point((blocks - 1) * (shard.windows - 1))
    pairs = together[np.triu_indices(blocks, 1)]
    expected = epochs * shard.windows * (per_window * (per_window - 1)) / (blocks * (blocks - 1))
    assert chi_square(pairs, expected) < one_percent_point(len(pairs))


def test_inside_a_window_every_order_is_as_likely():
    shard = make_shard(4, 2, 4)
    orders, draws = {}, 6000
    for window in range(draws):
        order = tuple(shard.window(window).records)
        orders[order] = orders.get(order, 0) + 1
    assert len(orders) == 24
    assert chi_square(np.array(list(orders.values())), draws / 24) < one_percent_point(23)


@pytest.mark.parametrize('arrangement', list(bench_shuffle.sorted_classes()))
def test_files_sorted_by_class_mix_nearly_as_well_as_a_full_shuffle(arrangement):
    """At the default settings; the aim is 1.5, the figures in the README come from tools.bench_shuffle."""
    counts = np.full(bench_shuffle.FILES, bench_shuffle.FILE_RECORDS)
    number, by, _ = choices.choose_shards(counts, bench_shuffle.GLOBAL_BATCH)
    layout = shards.Layout(counts, bench_shuffle.GLOBAL_BATCH, number, by, 0, BLOCK, WINDOW)
    steps = 20 * int(counts.sum()) // bench_shuffle.GLOBAL_BATCH
    batches = np.concatenate([s.take(0, steps * layout.share).reshape(steps, -1) for s in layout.shards], axis=1)
    assert bench_shuffle.variance_ratio(bench_shuffle.sorted_classes()[arrangement][batches]) <= 1.5


def test_the_measure_says_1_for_a_full_shuffle_and_much_more_for_none():
    classes = bench_shuffle.sorted_classes()['through all files']
    rng = np.random.default_rng(0)
    shuffled = np.concatenate([rng.permutation(classes).reshape(-1, 64) for _ in range(40)])
    assert bench_shuffle.variance_ratio(shuffled) == pytest.approx(1, rel=0.05)
    assert bench_shuffle.variance_ratio(classes.reshape(-1, 64)) > 50


def test_the_bench_prints_a_row_for_every_choice(monkeypatch, capsys):
    for name, value in dict(TURNS=1, EPOCHS=1, FILE_RECORDS=200, CHOICES=((8, 64), (16, 64))).items():
        monkeypatch.setattr(bench_shuffle, name, value)
    assert bench_shuffle.main([]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert 'within each file' in header and [row.split()[:2] for row in rows] == [['8', '64'], ['16', '64']]
