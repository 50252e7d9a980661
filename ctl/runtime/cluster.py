"""Several machines as one run: who they are, from the environment, and what they say to each other."""

import collections
import dataclasses
import json
import pathlib
import re
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from ctl.errors import Interrupted, UserError
from ctl.runtime import slurm


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The workers of a run.

    Attributes:
      addresses: host:port of every worker; the first is the chief, which writes.
      index: which of them this process is.
      run: the job and what it runs: of two that use the same addresses, no worker is let into the other.
    """

    addresses: tuple[str, ...] = ('',)
    index: int = 0
    run: str = ''

    @property
    def chief(self) -> bool:
        return self.index == 0

    def name(self, index: int) -> str:
        return f'worker {index} at {self.addresses[index]}'


ALONE = Cluster()
# How those parts of an error's message begin that say where a function was traced.
_TRACED = ('Graph execution error', 'Detected at', 'File "')
_ADDRESS = re.compile(r'[^\s/]+:([0-9]{1,5})', re.ASCII)


def check_alone(environment: Mapping[str, str]) -> None:
    """Raises UserError where the environment names several workers, and each would train alone, with nothing said.

    Also where TF_CONFIG cannot be read, and may name them.
    """
    try:
        jobs = _read_json(environment.get('TF_CONFIG') or '{}').get('cluster', {})
        workers = sum(len(addresses) for kind, addresses in jobs.items() if kind in ('chief', 'worker'))
    except (AttributeError, TypeError):
        workers = 0  # whatever it is, it is not for us
    what = f'TF_CONFIG names {workers} workers'
    # srun sets it for the tasks that it starts; a batch script alone is a task of none, though it has a SLURM_PROCID.
    tasks = environment.get('SLURM_STEP_NUM_TASKS', '1')
    if workers < 2 and 'SLURM_PROCID' in environment and tasks.isdigit():
        workers, what = int(tasks), f'srun started {tasks} tasks'
    if workers > 1:
        raise UserError(
            f'devices.strategy=auto: {what}. For one run of all take --config.devices.strategy=multi_worker; for '
            'runs that each train alone, one or mirrored, and a --workdir each.'
        )


def read_cluster(environment: Mapping[str, str]) -> Cluster:
    """The cluster that TF_CONFIG describes, or where there is none, Slurm's environment.

    TF_CONFIG is JSON: `{"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}`; a task of
    type `chief` may stand before the workers.

    Raises:
      UserError: for every mistake in it, before TensorFlow sees it.
    """
    text = environment.get('TF_CONFIG')
    if not text and 'SLURM_PROCID' in environment:
        return _read_slurm(environment)
    if not text and 'SLURM_JOB_ID' in environment:
        raise UserError('devices.strategy=multi_worker: in a Slurm job, srun is to start it, once for every task.')
    if not text:
        raise UserError(
            'devices.strategy=multi_worker: TF_CONFIG is not set, and this is no Slurm job. tools.launch sets it for '
            'several workers on this machine; a run goes on without others with --config.devices.strategy=auto.'
        )
    config = _read_json(text)
    try:
        jobs, task = config['cluster'], config['task']
        kind, index = task['type'], task['index']
    except (KeyError, TypeError):
        raise UserError(f'TF_CONFIG must have cluster, task.type and task.index: {text[:200]}') from None
    _check_jobs(jobs)
    if kind not in jobs:
        raise UserError(f'TF_CONFIG: task.type={kind!r} is not in cluster, which has {", ".join(jobs)}.')
    if type(index) is not int:
        raise UserError(f'TF_CONFIG: task.index={json.dumps(index)} must be a whole number, without quotes or point.')
    if not 0 <= index < len(jobs[kind]):
        raise UserError(
            f'TF_CONFIG: task.index={index!r} is not in 0 to {len(jobs[kind]) - 1}, the {kind}s of cluster.'
        )
    chiefs = jobs.get('chief', [])
    return Cluster((*chiefs, *jobs.get('worker', [])), index + (len(chiefs) if kind == 'worker' else 0))


def _read_json(text: str):
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f'TF_CONFIG is not JSON ({error}): {text[:80]}. Mend it, or unset it to train alone.') from None


def _check_jobs(jobs) -> None:
    if not isinstance(jobs, dict) or not jobs:
        raise UserError(f'TF_CONFIG: cluster={jobs!r} must be an object like {{"worker": ["host:port", ...]}}.')
    for kind, addresses in jobs.items():
        if kind not in ('chief', 'worker'):
            raise UserError(f'TF_CONFIG: cluster has {kind!r}; only chief and worker take part here.')
        if not isinstance(addresses, list) or not addresses:
            raise UserError(f'TF_CONFIG: cluster.{kind}={addresses!r} must be a list of "host:port".')
        for address in addresses:
            found = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
            if not found or not 0 < int(found[1]) < 65536:
                raise UserError(f'TF_CONFIG: cluster.{kind} has {address!r}, which is not "host:port".')
    if len(jobs.get('chief', [])) > 1:
        raise UserError(f'TF_CONFIG: cluster.chief has {len(jobs["chief"])} addresses; there is one chief.')
    counted = collections.Counter(address for addresses in jobs.values() for address in addresses)
    twice = [address for address, count in counted.items() if count > 1]
    if twice:
        raise UserError(f'TF_CONFIG: {twice[0]} is in cluster twice; every worker has a host:port of its own.')


def _read_slurm(environment: Mapping[str, str]) -> Cluster:
    addresses, index = slurm.addresses_and_index(environment)
    job, step = (environment.get(f'SLURM_{name}_ID', '') for name in ('JOB', 'STEP'))
    return Cluster(addresses, index, run=f'job {job}, step {step}')


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
    """What an error means when a worker is gone, with its own first line; None for any other error.

    An InternalError is one only where it names another worker: CUDA, cuDNN and NCCL fail with it as well, and those
    failures would come again.
    """
    if cluster is ALONE or not isinstance(error, (*_ERRORS_OF_A_LOST_WORKER, tf.errors.InternalError)):
        return None
    text = error.message or ''
    named = {int(index) for index in re.findall(r'/job:worker/(?:replica:0/)?task:(\d+)', text)}
    lost = sorted(index for index in named if index != cluster.index and index < len(cluster.addresses))
    if isinstance(error, tf.errors.InternalError) and not lost:
        return None
    who = ' or '.join(map(cluster.name, lost)) or 'another worker'
    # Of an error in a traced function, TensorFlow puts where it was traced before what it is.
    told = [part.strip() for part in text.split('\n\n') if not part.strip().startswith(_TRACED)]
    first = next((line.strip() for part in told for line in part.splitlines() if line.strip()), type(error).__name__)
    return Interrupted(f'{cluster.name(cluster.index)} lost {who} ({first[:300]})')


_ERRORS_OF_A_LOST_WORKER = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
)
