"""Which devices hold a replica, and how they sum: from the config to a tf.distribute strategy."""

import os
from collections.abc import Callable, Sequence

import keras
import ml_collections
import tensorflow as tf

from ctl.errors import Interrupted, UserError
from ctl.runtime import cluster
from ctl.runtime.meeting import meet
from ctl.runtime.stall import ends_without_python

_TOO_LATE = (
    'TensorFlow has run something before the devices were made. Move what the experiment does at import into '
    'make_experiment.'
)


def make_strategy(
    devices: ml_collections.ConfigDict,
    workers: cluster.Cluster = cluster.ALONE,
    say: Callable[[str], None] = print,
) -> tf.distribute.Strategy:
    """The strategy of a config's `devices` section. Comes before any other TensorFlow object.

    Without GPUs, or where these are not wanted, N replicas get N virtual CPU devices, so that whatever depends on their
    number runs anywhere. GPUs without a replica are not touched, and free for other programs.

    Args:
      devices: the section.
      workers: who takes part, for devices.strategy=multi_worker.
      say: is told whom this one waits for.

    Raises:
      UserError: for more replicas than GPUs, for an all-reduce these devices cannot do, and when TensorFlow has run
        something already.
      Interrupted: when other workers do not come.
    """
    gpus = _find_gpus(devices.kind)
    replicas = devices.replicas or len(gpus) or 1
    if gpus and replicas > len(gpus):
        raise UserError(
            f'devices.replicas={replicas}: this machine has {len(gpus)} GPU{"s" * (len(gpus) > 1)}. Take 0 for every '
            f'GPU, or devices.kind=cpu for {replicas} virtual devices of the CPU.'
        )
    if devices.strategy == 'one' and replicas > 1:
        raise UserError(f'devices.strategy=one has 1 replica, not devices.replicas={replicas}: take mirrored, or auto.')
    multi_worker = devices.strategy == 'multi_worker'
    if multi_worker:
        _check_multi_worker(devices, workers, bool(gpus))
    cross_device = _cross_device_ops(devices.all_reduce, bool(gpus))
    _show(gpus[:replicas])
    if multi_worker:
        return _multi_worker_strategy(devices, workers, len(gpus[:replicas]) or 1, say)
    if not gpus:
        _split_cpu(replicas)
    names = [f'/{"gpu" if gpus else "cpu"}:{i}' for i in range(replicas)]
    if devices.strategy == 'one' or (devices.strategy == 'auto' and replicas == 1):
        return tf.distribute.OneDeviceStrategy(names[0])
    return tf.distribute.MirroredStrategy(names, cross_device_ops=cross_device)


def on_cpus(devices: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """The `devices` section for a program that only reads: as many replicas as here, on CPUs; touches no GPU."""
    section = devices.copy_and_resolve_references()
    section.replicas = devices.replicas or len(_find_gpus(devices.kind)) or 1
    section.kind, section.all_reduce = 'cpu', 'auto'
    return section


def _find_gpus(kind: str) -> list[tf.config.PhysicalDevice]:
    """The GPUs to use; raises UserError where `kind` asks for some and there are none."""
    gpus = [] if kind == 'cpu' else tf.config.list_physical_devices('GPU')
    if kind == 'gpu' and not gpus:
        raise UserError('devices.kind=gpu: TensorFlow finds no GPU here. `nvidia-smi` lists them; take cpu, or auto.')
    return gpus


def _show(gpus: Sequence[tf.config.PhysicalDevice]) -> None:
    """Leaves the other GPUs alone, and of these takes memory as it is needed.

    TensorFlow would make a context, of hundreds of MB, on every one that it sees. Raises UserError when it has already.
    """
    growth, visible = tf.config.experimental.get_memory_growth, tf.config.get_visible_devices('GPU')
    if gpus and all(gpu in visible and growth(gpu) for gpu in gpus):
        return  # by an earlier strategy of this process, which had as many or more
    try:
        tf.config.set_visible_devices(gpus, 'GPU')
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
    except RuntimeError:
        raise UserError(f'devices.kind={"gpu" if gpus else "cpu"}: {_TOO_LATE}') from None


def _multi_worker_strategy(
    devices: ml_collections.ConfigDict, workers: cluster.Cluster, replicas: int, say: Callable[[str], None]
) -> tf.distribute.Strategy:
    """Waits until all workers are there, and proves that they hear each other.

    Raises:
      Interrupted: when not all are there in time, or what they say does not add up.
      UserError: when another process is the same worker, or was given another cluster.
    """
    meet(workers, devices.start_timeout, say, replicas, os.environ.get('CTL_SECRET', ''))
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({'worker': list(workers.addresses)}),
        task_type='worker',
        task_id=workers.index,
        rpc_layer='grpc',
    )
    # TensorFlow waits for the others with Python locked, for ever. All were there a moment ago.
    with ends_without_python(devices.start_timeout):
        strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver, communication_options(devices))
        heard = cluster.gather(strategy, [workers.index + 1])[:, 0].tolist()
    expected = list(range(1, len(workers.addresses) + 1))
    if heard != expected:
        raise Interrupted(f'the workers should have said {expected}, and {heard} was heard')
    return strategy


def _check_multi_worker(devices: ml_collections.ConfigDict, workers: cluster.Cluster, have_gpus: bool) -> None:
    if workers is cluster.ALONE:
        raise UserError('devices.strategy=multi_worker is for ctl.train; here, --workers=N stands for N machines.')
    if devices.input_pipelines == 'per_replica':
        raise UserError('devices.input_pipelines=per_replica is for one machine: workers have one each, per_worker.')
    if devices.all_reduce == 'hierarchical':
        raise UserError('devices.all_reduce=hierarchical is for one machine: take auto, ring or nccl.')
    if devices.replicas > 1 and not have_gpus:
        raise UserError(f'devices.replicas={devices.replicas}: a worker without GPUs has 1 replica. Take 0.')


def remedy_for_a_stall(strategy: tf.distribute.Strategy, alone: bool) -> str:
    """What to try where a step waits for its devices for ever."""
    if strategy.num_replicas_in_sync == 1:
        return 'look at the device, with nvidia-smi where it is a GPU'
    return f'try --config.devices.all_reduce={"hierarchical" if alone else "ring"}'


def _cross_device_ops(all_reduce: str, have_gpus: bool) -> tf.distribute.CrossDeviceOps | None:
    """How a MirroredStrategy sums; None is its own choice, collective ops: NCCL between GPUs, ring between CPUs."""
    if all_reduce == 'nccl' and not have_gpus:
        raise UserError('devices.all_reduce=nccl needs GPUs, and there are none: take auto or hierarchical.')
    if all_reduce == 'hierarchical':
        return tf.distribute.HierarchicalCopyAllReduce()
    if all_reduce == 'auto' and not have_gpus:
        # A few threads of one process gain nothing from a ring, and a process can make only one of one size.
        return tf.distribute.ReductionToOneDevice()
    return None


def communication_options(devices: ml_collections.ConfigDict) -> tf.distribute.experimental.CommunicationOptions:
    """What an all-reduce by collective ops is told."""
    implementations = tf.distribute.experimental.CommunicationImplementation
    chosen = {'nccl': implementations.NCCL, 'ring': implementations.RING}
    return tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=devices.bytes_per_pack,
        implementation=chosen.get(devices.all_reduce, implementations.AUTO),
    )


def _split_cpu(replicas: int) -> None:
    """Makes at least `replicas` virtual CPU devices."""
    cpu = tf.config.list_physical_devices('CPU')[0]
    if replicas <= len(tf.config.get_logical_device_configuration(cpu) or [None]):
        return
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
    except RuntimeError:
        raise UserError(f'devices.replicas={replicas}: {_TOO_LATE}') from None


def set_precision(precision: str) -> None:
    """Makes Keras layers compute in `precision`, with float32 weights. Before any layer is made.

    Left alone, TensorFlow multiplies float32 matrices with 10 bits of fraction on GPUs that have TensorFloat-32, too
    few for the same update on any hardware: here that has a name of its own.
    """
    tf.config.experimental.enable_tensor_float_32_execution(precision == 'tensorfloat32')
    keras.config.set_dtype_policy('mixed_bfloat16' if precision == 'bfloat16' else 'float32')
