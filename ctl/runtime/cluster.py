"""Several machines as one run: who they are, from the environment, and how they find and check each other."""

import collections
import contextlib
import dataclasses
import hashlib
import json
import math
import pathlib
import re
import signal
import socket
import time
from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf

from ctl.errors import Interrupted, UserError


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The workers of a run.

    Attributes:
      addresses: host:port of every worker; the first is the chief, which writes.
      index: which of them this process is.
    """

    addresses: tuple[str, ...] = ('',)
    index: int = 0

    @property
    def chief(self) -> bool:
        return self.index == 0

    def name(self, index: int) -> str:
        return f'worker {index} at {self.addresses[index]}'


ALONE = Cluster()


def read_cluster(environment: Mapping[str, str]) -> Cluster:
    """The cluster that TF_CONFIG describes, or where there is none, Slurm's environment.

    TF_CONFIG is JSON: `{"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}`; a task of
    type `chief` may stand before the workers.

    Raises:
      UserError: for every mistake in it, before TensorFlow sees it.
    """
    text = environment.get('TF_CONFIG')
    if text is None and 'SLURM_PROCID' in environment:
        return _read_slurm()
    if text is None:
        raise UserError(
            'devices.strategy=multi_worker: TF_CONFIG is not set, and this is no Slurm job. tools.launch sets it for '
            'several workers on this machine.'
        )
    try:
        config = json.loads(text)
        jobs, task = config['cluster'], config['task']
        kind, index = task['type'], task['index']
    except ValueError as error:
        raise UserError(f'TF_CONFIG is not JSON ({error}): {text[:80]}') from None
    except (KeyError, TypeError):
        raise UserError(f'TF_CONFIG must have cluster, task.type and task.index: {text[:200]}') from None
    _check_jobs(jobs)
    if kind not in jobs:
        raise UserError(f'TF_CONFIG: task.type={kind!r} is not in cluster, which has {", ".join(jobs)}.')
    if type(index) is not int or not 0 <= index < len(jobs[kind]):
        raise UserError(
            f'TF_CONFIG: task.index={index!r} is not in 0 to {len(jobs[kind]) - 1}, the {kind}s of cluster.'
        )
    chiefs = jobs.get('chief', [])
    return Cluster((*chiefs, *jobs.get('worker', [])), index + (len(chiefs) if kind == 'worker' else 0))


def _check_jobs(jobs) -> None:
    if not isinstance(jobs, dict) or not jobs:
        raise UserError(f'TF_CONFIG: cluster={jobs!r} must be an object like {{"worker": ["host:port", ...]}}.')
    for kind, addresses in jobs.items():
        if kind not in ('chief', 'worker'):
            raise UserError(f'TF_CONFIG: cluster has {kind!r}; only chief and worker take part here.')
        if not isinstance(addresses, list) or not addresses:
            raise UserError(f'TF_CONFIG: cluster.{kind}={addresses!r} must be a list of "host:port".')
        for address in addresses:
            host, _, port = address.rpartition(':') if isinstance(address, str) else ('', '', '')
            if not host or not port.isdigit() or not 0 < int(port) < 65536:
                raise UserError(f'TF_CONFIG: cluster.{kind} has {address!r}, which is not "host:port".')
    if len(jobs.get('chief', [])) > 1:
        raise UserError(f'TF_CONFIG: cluster.chief has {len(jobs["chief"])} addresses; there is one chief.')
    counted = collections.Counter(address for addresses in jobs.values() for address in addresses)
    twice = [address for address, count in counted.items() if count > 1]
    if twice:
        raise UserError(f'TF_CONFIG: {twice[0]} is in cluster twice; every worker has a host:port of its own.')


def _read_slurm() -> Cluster:
    try:
        # Which task has which GPU is Slurm's to say (srun --gpus-per-task), not the resolver's: it is told of plenty.
        resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
            gpus_per_node=1024, gpus_per_task=1, auto_set_gpu=False
        )
        addresses = resolver.cluster_spec().as_dict()['worker']
        _, index = resolver.get_task_info()
    except (KeyError, ValueError, RuntimeError) as error:
        raise UserError(
            f"Slurm's environment does not describe the job's tasks: {error}. Start it with srun."
        ) from None
    return Cluster(tuple(addresses), index)


def make_strategy(
    cluster: Cluster,
    communication: tf.distribute.experimental.CommunicationOptions,
    timeout: float,
    say: Callable[[str], None],
) -> tf.distribute.Strategy:
    """Waits until all workers are there, and proves that they hear each other.

    Raises:
      Interrupted: when not all are there after `timeout` seconds, or what they say does not add up.
      UserError: when another process is the same worker, or was given another cluster.
    """
    meet(cluster, timeout, say)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({'worker': list(cluster.addresses)}),
        task_type='worker',
        task_id=cluster.index,
        rpc_layer='grpc',
    )
    # TensorFlow waits for the others with Python locked, for ever. All were there a moment ago; should one have died
    # since, the alarm ends the process.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(math.ceil(timeout))
    strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver, communication)
    heard = gather(strategy, [cluster.index + 1])[:, 0].tolist()
    signal.alarm(0)
    expected = list(range(1, len(cluster.addresses) + 1))
    if heard != expected:
        raise Interrupted(f'the workers should have said {expected}, and {heard} was heard')
    return strategy


def meet(cluster: Cluster, timeout: float, say: Callable[[str], None]) -> None:
    """Returns when all workers are there: each calls at the chief's address, and the chief lets all go together.

    Raises:
      Interrupted: when not all are there after `timeout` seconds; names those that are missing.
      UserError: when another process is the same worker, or was given another cluster.
    """
    end = time.monotonic() + timeout
    if cluster.chief:
        _wait_for_workers(cluster, end, timeout, say)
    else:
        _call_the_chief(cluster, end, timeout, say)


def _wait_for_workers(cluster: Cluster, end: float, timeout: float, say: Callable[[str], None]) -> None:
    port = int(cluster.addresses[0].rpartition(':')[2])
    callers: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        try:
            listener = stack.enter_context(socket.create_server(('', port)))
        except OSError as error:
            raise UserError(f'{cluster.name(0)}: this machine cannot listen there: {error.strerror}.') from None
        listener.settimeout(1.0)
        said = ''
        while missing := [i for i in range(1, len(cluster.addresses)) if i not in callers]:
            text = ', '.join(map(cluster.name, missing))
            if text != said:
                say(f'{cluster.name(0)}: waiting for {text}')
                said = text
            if time.monotonic() > end:
                raise Interrupted(f'waited {timeout:g} s for {text} (devices.start_timeout)')
            with contextlib.suppress(TimeoutError):
                caller = stack.enter_context(listener.accept()[0])
                caller.settimeout(5.0)
                problem = _hear(caller, cluster, callers)
                if problem:
                    for each in (caller, *callers.values()):
                        each.sendall(problem.encode())
                    raise UserError(problem)
        for caller in callers.values():
            caller.sendall(b'go')


def _hear(caller: socket.socket, cluster: Cluster, callers: dict[int, socket.socket]) -> str:
    """Takes a worker's call into `callers`; what is wrong with it, or ''. A stranger's call is none."""
    try:
        index, digest = json.loads(caller.recv(1000))
    except (OSError, ValueError, TypeError):
        return ''
    if digest != _digest(cluster):
        return f'worker {index} was given another cluster than {cluster.name(0)}: give all the same.'
    if index in callers or index == 0:
        return f'two processes are {cluster.name(index)}: give each an index of its own.'
    callers[index] = caller
    return ''


def _call_the_chief(cluster: Cluster, end: float, timeout: float, say: Callable[[str], None]) -> None:
    host, _, port = cluster.addresses[0].rpartition(':')
    chief, said = cluster.name(0), False
    while time.monotonic() < end:
        try:
            with socket.create_connection((host, int(port)), timeout=max(0.1, end - time.monotonic())) as call:
                call.sendall(json.dumps([cluster.index, _digest(cluster)]).encode())
                answer = call.recv(1000).decode()
        except OSError:
            answer = ''
        if answer == 'go':
            return
        if answer:
            raise UserError(answer)
        if not said:
            say(f'{cluster.name(cluster.index)}: waiting for {chief}')
            said = True
        time.sleep(0.2)
    raise Interrupted(f'waited {timeout:g} s for {chief}, or for the others with it (devices.start_timeout)')


def _digest(cluster: Cluster) -> str:
    return hashlib.sha256(json.dumps(cluster.addresses).encode()).hexdigest()[:15]


def gather(strategy: tf.distribute.Strategy, numbers: list[int]) -> np.ndarray:
    """What every worker says, in their order: int64 [workers, numbers]. All must call it, with as many numbers."""
    everyone = _all_gather(strategy, tf.constant([numbers], tf.int64)).numpy()
    # Each of a worker's replicas has said the same.
    local = len(strategy.extended.worker_devices)
    return everyone[::local]


@tf.function(reduce_retracing=True)
def _all_gather(strategy: tf.distribute.Strategy, mine: tf.Tensor) -> tf.Tensor:
    def in_replica(mine: tf.Tensor) -> tf.Tensor:
        # The copy has a device, by which the strategy knows where the result belongs.
        return tf.distribute.get_replica_context().all_gather(tf.identity(mine), axis=0)

    return strategy.experimental_local_results(strategy.run(in_replica, args=(mine,)))[0]


def check_agreement(strategy: tf.distribute.Strategy, cluster: Cluster, said: Mapping[str, str]) -> None:
    """Compares what the workers are about to do.

    Args:
      said: what it is -> a digest of it, 15 hex digits or fewer.

    Raises:
      UserError: naming the first worker that differs from the chief, and in what.
    """
    everyone = gather(strategy, [int(digest[:15], 16) for digest in said.values()])
    for index, theirs in enumerate(everyone):
        for what, mine, chiefs in zip(said, theirs, everyone[0], strict=True):
            if mine != chiefs:
                raise UserError(
                    f'{cluster.name(index)} has another {what} than {cluster.name(0)}: start all with the same '
                    'command, on the same files.'
                )


def check_shared(strategy: tf.distribute.Strategy, cluster: Cluster, workdir: pathlib.Path, sees: bool) -> None:
    """Raises UserError unless every worker `sees` what the chief has written in the workdir."""
    blind = np.flatnonzero(gather(strategy, [int(sees)])[:, 0] == 0)
    if len(blind):
        raise UserError(
            f'--workdir={workdir}: what {cluster.name(0)} writes there is not seen by {cluster.name(int(blind[0]))}: '
            'take a folder that all workers share.'
        )


def explain_loss(error: tf.errors.OpError, cluster: Cluster) -> Interrupted | None:
    """What an error of a collective means when a worker is gone; None for any other error."""
    if cluster is ALONE or not isinstance(error, _ERRORS_OF_A_LOST_WORKER):
        return None
    lost = {int(index) for index in re.findall(r'/job:worker/(?:replica:0/)?task:(\d+)', error.message or '')}
    lost = sorted(index for index in lost if index != cluster.index and index < len(cluster.addresses))
    who = ' or '.join(map(cluster.name, lost)) or 'another worker'
    return Interrupted(f'{cluster.name(cluster.index)} lost {who}')


_ERRORS_OF_A_LOST_WORKER = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.InternalError,
)
