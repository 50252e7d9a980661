"""What two seeds can have in common, and what they cannot."""

import numpy as np
import tensorflow as tf

from ctl import seeds

LARGEST = 2**31 - 1


def test_different_records_never_share_a_seed_not_even_where_the_sum_wraps():
    records = tf.constant([0, 1, LARGEST, LARGEST + 1, 2**32 - 1, 2**32, 2**40 + 1], tf.int64)
    for seed in ([0, 0], [LARGEST, LARGEST], [-5, 3]):
        found = seeds.of_records(tf.constant(seed), records).numpy()
        assert found.dtype == np.int32 and len({tuple(each) for each in found}) == len(records)


def test_a_record_of_another_step_has_the_same_seed_where_the_seeds_differ_by_as_much_as_the_records():
    one, other = (seeds.of_records(tf.constant([first, 0]), tf.range(10, dtype=tf.int64)) for first in (100, 103))
    assert np.array_equal(one[3:], other[:-3])


def test_a_fold_keeps_its_number_so_that_other_numbers_give_other_seeds():
    seed = seeds.fold(tf.constant([7, 1]), tf.constant(5, tf.int64))
    assert [seeds.fold(seed, number).numpy()[1] for number in range(20)] == list(range(20))
    assert seeds.fold(seed, 3).dtype == tf.int32
    assert np.array_equal(seeds.fold(seed, 3), seeds.fold(seed, 3))
    assert seeds.fold(None, 3) is None
