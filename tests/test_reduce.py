"""Gradients of the global mean, whatever each replica holds."""

import numpy as np
import pytest
import tensorflow as tf

from ctl import losses, reduce
from ctl.config import base_config
from ctl.runtime import devices


def on_two_replicas(function, per_replica_values):
    """`function(value)` on two replicas, each with its own value; the two results."""
    strategy = tf.distribute.MirroredStrategy(
        ['/cpu:0', '/cpu:1'], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )
    values = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(per_replica_values[context.replica_id_in_sync_group])
    )
    results = tf.function(lambda: strategy.run(function, args=(values,)))()
    return tf.nest.map_structure(lambda r: [x.numpy() for x in strategy.experimental_local_results(r)], results)


def objective_of(values_and_weights):
    """Two terms over one slice: values [n], weights [n]."""
    values, weights = tf.unstack(values_and_weights)
    terms = {
        'mean': losses.weighted_sum(values, weights),
        'square': losses.weighted_sum(values**2, tf.ones_like(weights)),
    }
    return reduce.replica_objective(terms, reduce.global_weights(terms))


def test_the_objective_is_the_sum_of_global_means_however_unevenly_weights_fall():  # C12, C15
    # 1 token counts on replica 0 and 3 on replica 1: a mean of means would weigh them 3 to 1.
    slices = [[[2.0, 9, 9, 9], [1, 0, 0, 0]], [[4.0, 5, 6, 9], [1, 1, 1, 0]]]
    parts = on_two_replicas(objective_of, slices)
    values, weights = np.concatenate(slices, axis=1)
    assert sum(parts) == pytest.approx((values * weights).sum() / 4 + (values**2).mean())


def test_a_replica_without_a_single_masked_token_gives_0_and_no_nan():  # C03
    parts = on_two_replicas(objective_of, [[[2.0, 4], [1, 1]], [[0.0, 0], [0, 0]]])
    assert parts[0] == pytest.approx(3 + 20 / 4)
    assert parts[1] == 0


def test_a_term_that_nothing_counts_towards_anywhere_adds_0_and_a_gradient_of_0():
    def step(slice_):
        with tf.GradientTape() as tape:
            tape.watch(slice_)
            values, weights = tf.unstack(slice_)
            terms = {'mean': losses.weighted_sum(values, weights)}
            value = reduce.replica_objective(terms, reduce.global_weights(terms))
        return value, tape.gradient(value, slice_)

    values, gradients = on_two_replicas(step, [[[2.0, 4], [0, 0]], [[1.0, 0], [0, 0]]])
    assert values == [0, 0]
    assert all(np.isfinite(gradient).all() for gradient in gradients)


def test_a_replicas_gradient_before_the_reduce_is_of_its_own_sum_over_the_global_weight():  # C14, C15
    """Slices of 3 and 5 examples: the denominator is 8, not 3, 5 or an assumed 4."""

    def step(weights):
        with tf.GradientTape() as tape:
            x = tf.constant([1.0, 2, 3, 4, 5])
            tape.watch(x)
            terms = {'mean': losses.weighted_sum(3 * x, weights)}
            value = reduce.replica_objective(terms, reduce.global_weights(terms))
        return tape.gradient(value, x)

    three, five = on_two_replicas(step, [[1.0, 1, 1, 0, 0], [1.0, 1, 1, 1, 1]])
    assert three == pytest.approx(np.array([1, 1, 1, 0, 0]) * 3 / 8)
    assert five == pytest.approx(np.ones(5) * 3 / 8)


def test_the_clip_comes_after_the_reduce():  # C37
    """(3, 4) and (3, -4) add up to (6, 0): clipped to 1 that is (1, 0). Clipped before, it would be (1.2, 0)."""

    def step(gradient):
        (total,) = reduce.sum_over_replicas([gradient])
        norm = tf.linalg.global_norm([total])
        return reduce.clip([total], norm, 1.0)[0], norm

    clipped, norms = on_two_replicas(step, [[3.0, 4], [3.0, -4]])
    assert norms == [6, 6]
    assert np.array(clipped) == pytest.approx(np.array([[1, 0], [1, 0]]))


@pytest.mark.parametrize('clip_norm, expected', [(0.0, [3, 4]), (10.0, [3, 4]), (1.0, [0.6, 0.8])])
def test_the_clip_scales_down_only_what_is_too_long(clip_norm, expected):
    gradient = tf.constant([3.0, 4])
    assert reduce.clip([gradient], tf.constant(5.0), clip_norm)[0].numpy() == pytest.approx(np.array(expected))


def test_repeated_ids_are_added_up_before_the_norm():  # C36
    slices = tf.IndexedSlices(tf.constant([[1.0], [3.0]]), tf.constant([2, 2]), tf.constant([4, 1]))
    gradient = reduce.dense(slices)
    assert isinstance(gradient, tf.Tensor) and gradient.shape == (4, 1)
    assert tf.linalg.global_norm([gradient]).numpy() == 4


@pytest.mark.parametrize('kind', [tf.distribute.ReductionToOneDevice, tf.distribute.HierarchicalCopyAllReduce])
def test_every_all_reduce_that_runs_on_cpus_sums(kind):
    strategy = tf.distribute.MirroredStrategy(['/cpu:0', '/cpu:1'], cross_device_ops=kind())

    def step():
        replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
        return reduce.sum_over_replicas([tf.fill([3], 1.0 + replica), tf.constant(2.0)])

    vector, scalar = tf.function(lambda: strategy.run(step))()
    for results, expected in ((vector, [3.0] * 3), (scalar, 4.0)):
        assert [x.numpy().tolist() for x in strategy.experimental_local_results(results)] == [expected] * 2


def test_a_structure_of_several_dtypes_comes_back_in_its_form_each_tensor_summed(monkeypatch):
    """Each pack of one dtype, as ring, NCCL and several workers need: float64 state beside float32 gradients."""
    strategy = tf.distribute.MirroredStrategy(
        ['/cpu:0', '/cpu:1'], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )
    all_reduce, packs = tf.distribute.ReplicaContext.all_reduce, []

    def spy(self, op, pack, options):
        packs.append([tensor.dtype for tensor in pack])
        return all_reduce(self, op, pack, options)

    monkeypatch.setattr(tf.distribute.ReplicaContext, 'all_reduce', spy)

    def step():
        one = {'b': [tf.ones([2]), tf.ones([3], tf.float64)], 'a': (tf.constant(2**40, tf.int64), tf.ones([]))}
        return reduce.sum_over_replicas(one)

    results = tf.function(lambda: strategy.run(step))()
    local = strategy.experimental_local_results
    found = tf.nest.map_structure(lambda result: [x.numpy().tolist() for x in local(result)], results)
    assert found == {'b': [[[2, 2]] * 2, [[2, 2, 2]] * 2], 'a': ([2**41] * 2, [2] * 2)}
    assert packs and all(len(set(pack)) == 1 for pack in packs)


def collectives(bytes_per_pack):
    """How many all-reduces two replicas with a ring make of five gradients of 4,000 bytes each."""
    config = base_config(devices=dict(all_reduce='ring', bytes_per_pack=bytes_per_pack)).devices
    strategy = tf.distribute.MirroredStrategy(['/cpu:0', '/cpu:1'])

    def replica():
        gradients = [tf.fill([1000], float(i)) for i in range(5)]
        return reduce.sum_over_replicas(gradients, devices.communication_options(config))

    graph = tf.function(lambda: strategy.run(replica)).get_concrete_function().graph
    return sum(operation.type.startswith('CollectiveReduce') for operation in graph.get_operations())


def test_gradients_travel_in_packs_so_that_the_first_need_not_wait_for_the_last():
    """tests/test_same_update.py trains with such packs."""
    assert collectives(8000) > collectives(0) > 0
