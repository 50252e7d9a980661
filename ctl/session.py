"""One start of a run: what was asked for, who takes part on which devices, who owns the workdir, and how it ends."""

import contextlib
import dataclasses
import errno
import os
import pathlib
import types
from collections.abc import Callable, Iterator

import ml_collections
import rich.console
import tensorflow as tf

from ctl.config import flatten
from ctl.errors import GuardError, Interrupted
from ctl.experiment import Experiment
from ctl.runtime import cluster, devices, lock, reporting, signals
from ctl.runtime import workdir as workdir_lib
from ctl.runtime.checkpoints import newest_in
from ctl.runtime.clock import Clock


@dataclasses.dataclass(frozen=True)
class Run:
    """What is asked for.

    Attributes:
      name: the experiment's.
      module: its file: get_config(), make_experiment(config), perhaps make_default_data(config).
      config: validated; takes the values that are chosen at the start, in place.
      workdir: where config.json, metrics.jsonl, checkpoints/ and tensorboard/ are, or will be.
      dry_run: print the plan, check that the run could start, write nothing in `workdir`, stop.
      break_lock: take the workdir over from another machine.
      experiment: as the workdir is to note it: a name, or the absolute path of a file; '' for `name`.
      command: what was typed, for the message on how to go on.
    """

    name: str
    module: types.ModuleType
    config: ml_collections.ConfigDict
    workdir: pathlib.Path
    dry_run: bool = False
    break_lock: bool = False
    experiment: str = ''
    command: str = ''


@dataclasses.dataclass(frozen=True)
class Session:
    """A run that has started, with its devices.

    Attributes:
      say: prints a line; for a worker that is not the chief, with its name before it.
      console: for the plan and the progress; quiet where this worker is not the chief.
      stop: whether a signal has asked the run to end.
      clock: where the time goes.
      lease: of the workdir; None where this process writes nothing there.
    """

    asked: Run
    workers: cluster.Cluster
    strategy: tf.distribute.Strategy
    console: rich.console.Console
    say: Callable[[str], None]
    stop: signals.Stop
    clock: Clock
    lease: lock.Lease | None

    def announce(self, text: str) -> None:
        """Prints a line that all workers would print, once."""
        self.console.print(text, markup=False)

    def check_workdir(self, output: object = None) -> None:
        """Before something is written to the workdir; raises WorkdirLost when another run has it now."""
        if self.lease:
            self.lease.check()

    def as_the_chief_says(self, number: int) -> int:
        """The chief's number, for all workers, which must all call this: what they read may differ for a moment."""
        return number if self.alone else int(cluster.gather(self.strategy, [number])[0, 0])

    def check(self) -> None:
        """Raises Interrupted when a signal has come. Several workers go on together, and agree after an inner loop."""
        if self.alone:
            self.stop.check()

    def check_before_training(self) -> None:
        """Raises Interrupted when a signal has come, and there is nothing to save."""
        if self.stop.asked:
            raise Interrupted(
                f'{self.stop.received} received: nothing more was trained. Go on with: {self.asked.command}'
            )

    @property
    def alone(self) -> bool:
        return self.workers is cluster.ALONE

    @property
    def replicas(self) -> int:
        return self.strategy.num_replicas_in_sync


@contextlib.contextmanager
def started(asked: Run) -> Iterator[Session]:
    """Finds the other workers and the devices, takes the workdir, and listens to signals inside the `with`.

    Raises:
      UserError: for devices that are not there, and a workdir that another process has.
      GuardError: when a disk is full.
      Interrupted: when a worker does not come, or is lost.
    """
    clock, workers = Clock(), cluster.ALONE
    if asked.config.devices.strategy == 'multi_worker':
        workers = cluster.read_cluster(os.environ)
        run = f'{workers.run} {asked.name} {asked.workdir.name}'
        workers = dataclasses.replace(workers, run=run)
    elif asked.config.devices.strategy == 'auto':
        cluster.check_alone(os.environ)
    console = reporting.make_console(quiet=not workers.chief)

    def say(text: str) -> None:
        if workers.chief:
            console.print(text, markup=False)
        else:
            print(f'worker {workers.index}: {text}', flush=True)

    with _ends_explained(asked, workers), contextlib.ExitStack() as stack:
        with signals.ending_at_once(f'Go on with: {asked.command}'):
            strategy = devices.make_strategy(asked.config.devices, workers, say)  # before any other TensorFlow object
        stop, lease = stack.enter_context(signals.Stop().watching()), None
        if workers.chief and not asked.dry_run:
            patience = asked.config.devices.start_timeout
            lease = stack.enter_context(lock.owned(asked.workdir, say, asked.break_lock, patience, stop.check))
        yield Session(asked, workers, strategy, console, say, stop, clock, lease)


@contextlib.contextmanager
def _ends_explained(asked: Run, workers: cluster.Cluster) -> Iterator[None]:
    """Turns the loss of a worker, and a full disk, into what the user can act on."""
    try:
        yield
    except tf.errors.OpError as error:
        interruption = cluster.explain_loss(error, workers)
        if interruption is None:
            raise
        newest = newest_in(asked.workdir / 'checkpoints') or 'none'
        raise Interrupted(f'{interruption}: the newest checkpoint is {newest}. Go on with: {asked.command}') from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        newest = newest_in(asked.workdir / 'checkpoints') or 'none'
        raise GuardError(
            f'{error.filename or asked.workdir} cannot be written: {error.strerror}. The newest checkpoint is {newest}.'
        ) from None


def say_if_older(session: Session, experiment: Experiment) -> None:
    """Says what goes on otherwise than it began, in a run that began with an older version."""
    workdir, config = session.asked.workdir, flatten(session.asked.config)
    if not workdir_lib.has_begun(workdir) or workdir_lib.read_config(workdir) is None:
        return
    note = workdir_lib.read_note(workdir)
    arithmetic = note.arithmetic if note else 0
    if arithmetic < 1:
        for section in [key.removesuffix('.weight_decay') for key in config if key.endswith('.weight_decay')]:
            if config[f'{section}.name'] == 'lamb' and config[f'{section}.weight_decay']:
                session.announce(
                    f'WARNING: {section}.name=lamb: this run began when its weight decay was outside of the trust '
                    'ratio. From here on it is inside, as in the paper.'
                )
    if arithmetic < 2:
        session.announce(
            'WARNING: this run began when seeds had 32 bits. From here on dropout and noise are drawn from 64: other '
            'numbers, of the same distributions.'
        )
        if any(value > 1 for key, value in config.items() if key.endswith('.updates')):
            session.announce(
                'WARNING: this run began when the numbers of a step with several updates were those of the last. From '
                'here on they are means over the updates, and the norm of the gradient the largest.'
            )
        if any('kernel_distance' in tally.names for tally in experiment.tallies):
            session.announce(
                'WARNING: this run began when kernel_distance compared the first records of the files. From here on '
                'they are a sample of all: values before and after do not compare.'
            )
        if config['eval.steps'] > 0:
            session.announce(
                f'WARNING: this run began when eval.steps={config["eval.steps"]} took the first records of the files. '
                'From here on they are a sample of all: evaluations before and after do not compare.'
            )
        if config['train.precision'] == 'float32' and tf.config.list_physical_devices('GPU'):
            session.announce(
                'WARNING: this run began when float32 meant TensorFloat-32 on GPUs that have it. From here on it means '
                'float32; --config.train.precision=tensorfloat32 is for a new run.'
            )
