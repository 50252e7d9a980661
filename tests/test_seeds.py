"""What two seeds can have in common, and what they cannot."""

import re
import unittest.mock

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


def test_on_gpus_every_seed_is_made_on_the_host():
    """By the placement in the graph; without GPUs where its replica is."""
    for gpus, device in ((['a GPU'], 'CPU:0'), ([], 'CPU:1')):
        makers = [node for node in graph_of_seeds(gpus) if re.match('Stateless|Pack|Bitcast|Add', node.op)]
        assert len(makers) == 8 and all(node.device.endswith(device) for node in makers)


def graph_of_seeds(gpus):
    """The nodes of a function that folds seeds on another device."""

    @tf.function
    def draw(step):
        with tf.device('/cpu:1'):
            return seeds.of_records(seeds.fold(tf.constant([1, 2]), step, 3), tf.range(4, dtype=tf.int64))

    with unittest.mock.patch.object(tf.config, 'list_logical_devices', lambda kind: gpus):
        return draw.get_concrete_function(tf.TensorSpec([], tf.int64)).graph.as_graph_def().node
