"""What two seeds can have in common, and what they cannot."""

import re
import unittest.mock

import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from ctl import seeds

WORDS = st.integers(-(2**63), 2**63 - 1)


@settings(deadline=None)
@given(first=WORDS, second=WORDS, records=st.lists(st.integers(0, 2**63 - 1), min_size=1, unique=True))
def test_each_record_has_the_seed_that_a_fold_by_its_number_is(first, second, records):
    seed = seeds.make(first, second)
    found = seeds.of_records(seed, tf.constant(records, tf.int64))
    assert found.dtype == tf.int64 and found.shape == [len(records), 2]
    assert found[0].numpy().tolist() == seeds.fold(seed, records[0]).numpy().tolist()
    assert len({tuple(each) for each in found.numpy()}) == len(records)


def test_a_fold_keeps_its_number_and_a_hash_of_64_bits():
    seed = seeds.fold(seeds.make(7, 1), tf.constant(5, tf.int64))
    for number in (0, 3, tf.constant(3), tf.constant(-3, tf.int64), 2**62):
        folded = seeds.fold(seed, number)
        assert folded.dtype == tf.int64 and folded[1] == tf.cast(number, tf.int64)
    hashes = np.array([seeds.fold(seeds.make(7, i), 0).numpy()[0] for i in range(64)])
    assert len(set(hashes)) == 64 and (abs(hashes) > 2**40).all()
    assert np.array_equal(seeds.fold(seed, 3), seeds.fold(seed, 3))
    assert seeds.fold(None, 3) is None


def test_seeds_of_32_bits_that_were_once_equal_are_not():
    """Of step 33,129, record 2, and of step 2,296, record 0, when a step's seed was a hash of 32 bits."""
    one, other = (seeds.of_records(seeds.fold(seeds.make(0, 0), step, 0), tf.range(4, dtype=tf.int64))
                  for step in (33_129, 2_296))  # fmt: skip
    assert not np.intersect1d(one, other[:, :1]).size


@given(
    seed=st.integers(0, 2**31 - 1),
    readings=st.sets(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**63 - 1)), min_size=1),
)
def test_no_record_has_the_same_seed_in_two_epochs_or_two_runs(seed, readings):
    epochs, records = (tf.constant(each, tf.int64) for each in zip(*readings, strict=True))
    found = {tuple(each) for seed in {seed, seed ^ 1} for each in seeds.of_readings(seed, epochs, records).numpy()}
    assert len(found) == 2 * len(readings)


def test_on_gpus_every_seed_is_made_on_the_host():
    """By the placement in the graph; without GPUs where its replica is."""
    for gpus, device in ((['a GPU'], 'CPU:0'), ([], 'CPU:1')):
        makers = [node for node in graph_of_seeds(gpus) if re.match('Stateless|Pack|Fill', node.op)]
        assert len(makers) == 11 and all(node.device.endswith(device) for node in makers)


def graph_of_seeds(gpus):
    """The nodes of a function that folds seeds on another device."""

    @tf.function
    def draw(step):
        with tf.device('/cpu:1'):
            return seeds.of_records(seeds.fold(seeds.make(1, 2), step, 3), tf.range(4, dtype=tf.int64))

    with unittest.mock.patch.object(tf.config, 'list_logical_devices', lambda kind: gpus):
        return draw.get_concrete_function(tf.TensorSpec([], tf.int64)).graph.as_graph_def().node
