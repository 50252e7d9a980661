"""From each replica's sums to the gradient of the global mean: the only all-reduces of training.

With S_r,t the sum of loss term t over replica r's slice, and W_t its weight over all replicas, the objective is

    sum over t of (sum over r of S_r,t) / W_t   =   sum over r of [ sum over t of S_r,t / W_t ]

so each replica differentiates its own bracket, and the gradients add up to the gradient of the objective exactly.
The same holds for microbatches inside a replica. Nothing is averaged, but for what no gradient moves.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from ctl.losses import WeightedSum


def global_weights(losses: Mapping[str, WeightedSum]) -> dict[str, tf.Tensor]:
    """The weight of every loss term over all replicas, in one all-reduce of a small vector. In replica context."""
    names = sorted(losses)
    local = tf.stack([tf.stop_gradient(tf.cast(losses[name].weight, tf.float32)) for name in names])
    summed = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, local)
    return dict(zip(names, tf.unstack(summed), strict=True))


def replica_objective(losses: Mapping[str, WeightedSum], weights: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """This replica's part of the objective, a scalar; a term that nothing counts towards anywhere adds 0."""
    return tf.add_n([tf.math.divide_no_nan(losses[name].sum, weights[name]) for name in sorted(losses)])


def sum_over_replicas(structure: Any, options: tf.distribute.experimental.CommunicationOptions | None = None) -> Any:
    """All-reduces by SUM every tensor of a nested structure, which comes back in the same form. In replica context.

    Tensors of one dtype travel in one pack: TensorFlow would pack all into one tensor, whatever they are. Pack follows
    pack, since replicas that began two in different orders would wait for each other for ever. Sparse gradients must be
    made dense before.
    """
    tensors = [tf.convert_to_tensor(value) for value in tf.nest.flatten(structure)]
    context, before = tf.distribute.get_replica_context(), []
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        with tf.control_dependencies(before):
            pack = [tf.identity(tensors[place]) for place in places]
        before = context.all_reduce(tf.distribute.ReduceOp.SUM, pack, options)
        for place, total in zip(places, before, strict=True):
            tensors[place] = total
    return tf.nest.pack_sequence_as(structure, tensors)


def assign_on_replicas(variables: Sequence[keras.Variable], values: Sequence[tf.Tensor]) -> None:
    """Assigns values, which are the same on every replica, to every replica's copy. In replica context."""
    if not variables:
        return

    def assign(strategy: tf.distribute.Strategy, *values) -> None:
        for variable, value in zip(variables, values, strict=True):
            strategy.extended.update(variable.value, lambda copy, value: copy.assign(value), args=(value,))

    tf.distribute.get_replica_context().merge_call(assign, args=tuple(values))


def dense(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    """The gradient of an embedding as one dense tensor: repeated ids are added up, and every replica's has one size.

    A norm taken over slices with repeated ids comes out too small, and gathering slices grows with the replicas.
    """
    return tf.convert_to_tensor(gradient)


def clip(gradients: Sequence[tf.Tensor], norm: tf.Tensor, clip_norm: float) -> list[tf.Tensor]:
    """Scales the reduced gradients down to a global norm of `clip_norm` where theirs, `norm`, is larger; 0 leaves them.

    Pascanu, Mikolov and Bengio 2013, "On the difficulty of training recurrent neural networks", algorithm 1.
    """
    if not clip_norm:
        return list(gradients)
    scale = clip_norm / tf.maximum(norm, clip_norm)
    return [gradient * tf.cast(scale, gradient.dtype) for gradient in gradients]
