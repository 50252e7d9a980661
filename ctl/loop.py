"""A run from its first line to its last, in the order things happen."""

import contextlib
import dataclasses
import errno
import hashlib
import os
import pathlib
import types
from collections.abc import Callable, Iterator

import keras
import ml_collections
import orbit
import rich.console
import tensorflow as tf

from ctl import config as config_lib
from ctl.data import pipeline, records
from ctl.data.inputs import Data, choose_data, find_data
from ctl.errors import GuardError, Interrupted
from ctl.evaluator import Evaluator
from ctl.experiment import Experiment
from ctl.nonfinite import NonFinite
from ctl.optimizers import make_optimizer
from ctl.runtime import cluster, devices, lock, plan, reporting, signals
from ctl.runtime import workdir as workdir_lib
from ctl.runtime.actions import Account, Best, Calendar, Evaluate, Report, Save, Together, Watch
from ctl.runtime.checkpoints import Checkpoints, find_checkpoint, newest_in
from ctl.runtime.clock import Clock, as_text
from ctl.runtime.pictures import Pictures
from ctl.step import Trainer
from ctl.update import Training


@dataclasses.dataclass(frozen=True)
class Run:
    """What is asked for.

    Attributes:
      name: the experiment's.
      module: its file: get_config(), make_experiment(config), perhaps make_default_data(config).
      config: validated; takes the values that are chosen here, in place.
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
class _Session:
    """One start of a run: what was asked for, on which devices, and who is told, asked to end and timed.

    Attributes:
      say: prints a line; for a worker that is not the chief, with its name before it.
      console: for the plan and the progress; quiet where this worker is not the chief.
    """

    asked: Run
    workers: cluster.Cluster
    strategy: tf.distribute.Strategy
    console: rich.console.Console
    say: Callable[[str], None]
    stop: signals.Stop
    clock: Clock

    def announce(self, text: str) -> None:
        """Prints a line that all workers would print, once."""
        self.console.print(text, markup=False)

    @property
    def alone(self) -> bool:
        return self.workers is cluster.ALONE


@dataclasses.dataclass(frozen=True)
class _Parts:
    """What trains, and what is saved of it."""

    experiment: Experiment
    trainer: Trainer
    checkpoints: Checkpoints


def run(asked: Run) -> None:
    """Trains an experiment up to step `config.train.steps`, from wherever the workdir left off.

    Raises:
      UserError: when what the user gave cannot be run.
      GuardError: when a guard stopped the run.
      Interrupted: when a signal did, or another worker is gone.
    """
    clock, config = Clock(), asked.config
    workers = cluster.ALONE
    if config.devices.strategy == 'multi_worker':
        workers = cluster.read_cluster(os.environ)
    console = reporting.make_console(quiet=not workers.chief)

    def say(text: str) -> None:
        if workers.chief:
            console.print(text, markup=False)
        else:
            print(f'worker {workers.index}: {text}', flush=True)

    strategy = devices.make_strategy(config.devices, workers, say)  # before any other TensorFlow object
    owned = lock.owned(asked.workdir, say, asked.break_lock)
    if asked.dry_run or not workers.chief:
        owned = contextlib.nullcontext()
    with signals.Stop().watching() as stop, owned, _ends_explained(asked, workers):
        _run(_Session(asked, workers, strategy, console, say, stop, clock))


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


def _run(session: _Session) -> None:
    """The story of a run: data, model, where it left off, the plan, training, the summary."""
    asked, config, say = session.asked, session.asked.config, session.say
    replicas = session.strategy.num_replicas_in_sync
    default_data = choose_data(asked.name, asked.module, config, say)
    config_lib.resume(config, workdir_lib.read_config(asked.workdir))
    data = find_data(config, replicas, default_data, say, session.console, len(session.workers.addresses))
    _check_workers(session, data)
    parts, data = _make_parts(session, data)
    source, eval_source = (
        records.make_source(index, parts.experiment, data.bad) for index in (data.train, data.evaluation)
    )
    step, started_from = _restore(session, parts.checkpoints)
    plan.print_plan(
        session.console,
        {
            'experiment': asked.name,
            **plan.device_rows(config, session.strategy, session.workers),
            **plan.data_rows(config, data),
            **plan.model_rows(parts.experiment, config.train),
            **plan.run_rows(asked.workdir, parts.checkpoints, step, config.train.steps, started_from),
        },
    )
    metrics = workdir_lib.MetricsFile(asked.workdir, writes=session.workers.chief)
    if asked.dry_run:
        say(plan.feed_text(data, step, replicas))
        say('Dry run: the run could start. Nothing was trained, and nothing written to the workdir.')
        return
    if step > config.train.steps or (step == config.train.steps and metrics.has(step, 'eval')):
        say(f'Already at step {step} of {config.train.steps}. A larger --config.train.steps goes on from here.')
        return

    _open_workdir(session, data, parts.checkpoints, metrics, step)
    evaluator = _make_inputs(session, data, parts, source, eval_source, step)
    try:
        with records.explained(source, eval_source):
            newest = _train(session, data, parts, evaluator, metrics)
    except GuardError as error:
        if error.step is not None:
            say(plan.feed_text(data, error.step, replicas, most=None))
        raise
    except Interrupted as interruption:
        saved = 'nothing was trained yet'
        if parts.checkpoints.newest:
            saved = f'saved at step {int(parts.trainer.step.numpy())}'
        raise Interrupted(f'{interruption}: {saved}. Go on with: {asked.command}') from None
    references = data.default.references if data.default else {}
    reporting.print_summary(
        session.console,
        asked.workdir,
        parts.checkpoints.newest,
        newest,
        next((_numbers(line) for line in metrics.read('eval') if line['step'] == 0), {}),
        references,
        bad_records=str(data.bad) if data.bad.skip else None,
        time=as_text(session.clock.seconds),
    )


def _numbers(line: dict) -> dict[str, float]:
    """The metrics of a line of metrics.jsonl."""
    return {name: value for name, value in line.items() if isinstance(value, float)}


def _check_workers(session: _Session, data: Data) -> None:
    """Raises UserError when workers are about to do different things."""
    if session.alone:
        return
    said = {
        'config': hashlib.sha256(config_lib.to_json(session.asked.config).encode()).hexdigest(),
        'set of training records': data.train.digest,
        'set of evaluation records': data.evaluation.digest,
    }
    cluster.check_agreement(session.strategy, session.workers, said)


def _make_parts(session: _Session, data: Data) -> tuple[_Parts, Data]:
    """The experiment, its optimizers and trainer, and their checkpoints; the data as its steps read it."""
    asked, config = session.asked, session.asked.config
    # Here, so that it does not matter what was made before: names of layers, and initial weights, are always the same.
    keras.utils.clear_session()
    keras.utils.set_random_seed(config.train.seed)
    devices.set_precision(config.train.precision)  # clear_session forgets it

    def say_skipped(steps: list[int]) -> None:
        for step in steps:
            session.say(f'WARNING: the loss or gradient of step {step} is not finite; it changed nothing. Its records:')
            session.say(plan.feed_text(data, step, session.strategy.num_replicas_in_sync, most=None))

    with session.strategy.scope():
        experiment = asked.module.make_experiment(config)
        data = data.for_batches(experiment.update_names(config.train))
        optimizers = {
            each.name: make_optimizer(each.optimizer, config.train.steps, each.variables, each.updates)
            for each in experiment.objectives
        }
        training = Training(
            experiment,
            optimizers,
            seed=config.train.seed,
            microbatches=config.train.microbatches,
            update_order=config.train.update_order,
            fresh_batches=config.train.fresh_batches,
            communication=devices.communication_options(config.devices.all_reduce),
        )
        skip, most_in_a_row = config.train.on_nonfinite == 'skip', config.train.max_nonfinite
        nonfinite = NonFinite(skip, most_in_a_row, list(optimizers), say_skipped)
        trainer = Trainer(session.strategy, training, nonfinite, config.log.every, count_skipped=data.bad.skip)
    checkpoints = Checkpoints(
        asked.workdir / 'checkpoints',
        trainer.step,
        experiment,
        optimizers,
        trainer.sums,
        keep=config.checkpoint.keep,
        in_background=config.checkpoint.async_save,
        writes=session.workers.chief,
    )
    return _Parts(experiment, trainer, checkpoints), data


def _restore(session: _Session, checkpoints: Checkpoints) -> tuple[int, str | None]:
    """Restores the run's newest checkpoint, or else begins with another's weights; the step, and whose weights."""
    asked = session.asked
    with session.strategy.scope(), session.clock.during('restore'):
        step = checkpoints.choose(session.say, touch=not asked.dry_run) if session.workers.chief else 0
        if not session.alone:
            step = int(cluster.gather(session.strategy, [step])[0, 0])
        checkpoints.restore(step)
        if step or not asked.config.train.init_checkpoint:
            return step, None
        path = find_checkpoint(asked.config.train.init_checkpoint)
        checkpoints.load_weights(path)
        return step, path


def _open_workdir(
    session: _Session, data: Data, checkpoints: Checkpoints, metrics: workdir_lib.MetricsFile, step: int
) -> None:
    """From here on the workdir is written to: what is left in it of steps after `step` goes."""
    workdir, workers = session.asked.workdir, session.workers
    if workers.chief:
        workdir_lib.write_config(workdir, config_lib.to_json(session.asked.config))
        workdir_lib.write_experiment(workdir, session.asked.experiment or session.asked.name)
        checkpoints.clean()
        metrics.drop_after(step)
        session.clock.go_on(workdir / 'time.json')
    data.bad.keep(workdir / ('bad_records.jsonl' if workers.chief else f'bad_records-{workers.index}.jsonl'))


def _make_inputs(
    session: _Session, data: Data, parts: _Parts, source: records.Source, eval_source: records.Source, step: int
) -> Evaluator:
    """Gives the trainer its input from `step` on, and makes the evaluator with its own."""
    batch_size = session.asked.config.train.global_batch_size
    train_fn = pipeline.make_train_dataset_fn(source, data.layout, step)
    eval_fn = pipeline.make_eval_dataset_fn(eval_source, batch_size, data.eval_records, data.layout.window_records)
    # Only now is it known which step comes next: a distributed iterator cannot be restored, but it can start anywhere.
    per_replica = session.alone and data.pipelines > 1
    parts.trainer.train_dataset = pipeline.distribute(session.strategy, train_fn, per_replica)
    eval_dataset = pipeline.distribute(session.strategy, eval_fn, per_replica)
    # Workers evaluate together to the end: they agree on when to stop between inner loops.
    check = session.stop.check if session.alone else lambda: None
    return Evaluator(session.strategy, parts.experiment, eval_dataset, check)


def _train(
    session: _Session, data: Data, parts: _Parts, evaluator: Evaluator, metrics: workdir_lib.MetricsFile
) -> dict[str, float]:
    """Orbit's outer loop, from the trainer's step to the last, and what happens between steps; the last evaluation."""
    config, clock, chief = session.asked.config, session.clock, session.workers.chief
    trainer, checkpoints, calendar = parts.trainer, parts.checkpoints, Calendar.of(config)
    step, batch_size = trainer.step, config.train.global_batch_size
    first, tensorboard = int(step.numpy()), session.asked.workdir / 'tensorboard'
    with reporting.Progress(session.console, config.train.steps, first) as progress:
        together = Together(session.strategy, session.workers, session.stop, trainer)
        best = Best(checkpoints, config.checkpoint.best_metric, config.checkpoint.best_mode)
        eval_steps = pipeline.eval_steps(data.eval_records, batch_size, data.pipelines)
        pictures = Pictures(parts.experiment.pictures, session.asked.workdir, chief)
        evaluate = Evaluate(calendar, metrics, progress, step, eval_steps, best, clock, pictures)
        controller = orbit.Controller(
            global_step=step,
            trainer=trainer,
            evaluator=evaluator,
            strategy=session.strategy,
            steps_per_loop=lambda now: calendar.loop(now, trainer.seconds_per_step),
            train_actions=[
                Account(clock, trainer),
                together,
                Report(metrics, progress, step, batch_size * data.layout.batches_per_step, data.bad),
                Watch(parts.experiment.objectives, metrics, step, config.train.watch_steps, session.announce),
                evaluate,
                Save(calendar, checkpoints, step, together, clock),
            ],
            summary_dir=str(tensorboard / 'train') if chief else None,
            eval_summary_dir=str(tensorboard / 'eval') if chief else None,
            summary_interval=config.log.every,
        )
        evaluate.controller = controller
        if session.alone:
            session.stop.check()
        due = calendar.due(calendar.evaluate, first) if first else config.eval.at_start
        if due and not metrics.has(first, 'eval'):  # otherwise the run was interrupted in it
            evaluate.now()
        controller.train(config.train.steps)
        with clock.during('save'):
            checkpoints.finish()
        clock.saved()
        if not session.alone:
            cluster.gather(session.strategy, [0])  # none leaves before the chief has written
    return evaluate.newest
