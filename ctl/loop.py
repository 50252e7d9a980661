"""A run from its first line to its last, in the order things happen."""

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator

import keras
import orbit
import tensorflow as tf

from ctl import config as config_lib
from ctl.data import pipeline, records
from ctl.data.inputs import Data, choose_data, find_data
from ctl.errors import GuardError, Interrupted, UserError, WorkdirLost
from ctl.evaluator import Evaluator
from ctl.experiment import Experiment, make_experiment
from ctl.nonfinite import NonFinite
from ctl.optimizers import make_optimizer
from ctl.runtime import actions, cluster, devices, lock, plan, reporting
from ctl.runtime import workdir as workdir_lib
from ctl.runtime.actions import Calendar, Numbers
from ctl.runtime.agreement import Agreement
from ctl.runtime.best import BestCheckpoint, Contest
from ctl.runtime.checkpoints import Checkpoints, find_checkpoint
from ctl.runtime.clock import as_text
from ctl.runtime.pictures import Pictures
from ctl.runtime.stall import Watch
from ctl.runtime.state import State
from ctl.runtime.tensorboard import TensorBoard
from ctl.session import Run, Session, say_if_older, started
from ctl.step import Trainer, host_counter
from ctl.update import Training


def run(asked: Run) -> None:
    """Trains an experiment up to step `config.train.steps`, from wherever the workdir left off.

    Raises:
      UserError: when what the user gave cannot be run.
      GuardError: when a guard stopped the run.
      Interrupted: when a signal did, or another worker is gone.
    """
    with started(asked) as session:
        _run(session)


@dataclasses.dataclass(frozen=True)
class _Parts:
    """What trains, what it reads, and what is saved of it.

    Attributes:
      data: as the experiment's steps read it.
      source, eval_source: the records of training and of evaluation, looked at.
    """

    experiment: Experiment
    trainer: Trainer
    watch: Watch
    checkpoints: Checkpoints
    best: BestCheckpoint
    data: Data
    source: records.Source
    eval_source: records.Source


def _run(session: Session) -> None:
    """The story of a run: data, model, where it left off, the plan, training, the summary."""
    asked, config, say = session.asked, session.asked.config, session.say
    stored = workdir_lib.read_config(asked.workdir) if workdir_lib.has_begun(asked.workdir) else None
    default_data = choose_data(asked.name, asked.module, config, say, stored)
    workers = len(session.workers.addresses)
    found = find_data(
        config, session.replicas, default_data, say, session.console, workers, check=session.check_before_training
    )
    _check_workers(session, found)
    parts = _make_parts(session, found)
    say_if_older(session, parts.experiment)
    step, started_from = _restore(session, parts.checkpoints)
    plan.print_plan(
        session.console,
        {
            'experiment': asked.name,
            **plan.device_rows(config, session.strategy, session.workers),
            **plan.data_rows(config, parts.data),
            **plan.model_rows(parts.experiment, config.train),
            **plan.schedule_rows(parts.experiment, stored, step, config.train.steps),
            **plan.run_rows(asked.workdir, parts.checkpoints, step, config.train.steps, started_from),
        },
    )
    chief = session.workers.chief
    metrics = workdir_lib.MetricsFile(asked.workdir, writes=chief, check=session.check_workdir)
    at_end = session.as_the_chief_says(step == config.train.steps and metrics.has(step, 'eval'))
    if not asked.dry_run and (at_end or step > config.train.steps):
        say(f'Already at step {step} of {config.train.steps}. A larger --config.train.steps goes on from here.')
        return
    if not step and metrics.last_step():
        say(
            f'WARNING: metrics.jsonl tells of {metrics.last_step()} steps, and there is no checkpoint of them: they '
            'come again, from step 0.'
        )
    agreement = Agreement(session.strategy, session.workers, session.stop, parts.trainer)
    evaluator = _make_evaluator(session, parts, agreement)
    if asked.dry_run:
        say(plan.feed_text(parts.data, step, session.replicas))
        say('Dry run: the run could start. Nothing was trained, and nothing written to the workdir.')
        return

    numbers = Numbers(metrics, TensorBoard(asked.workdir, [o.name for o in parts.experiment.objectives], chief))
    _open_workdir(session, parts, numbers, step)
    _feed(session, parts, step)
    with _stops_explained(session, parts), records.explained(parts.source, parts.eval_source, say=session.say):
        newest = _train(session, parts, agreement, evaluator, numbers)
    _print_summary(session, parts, metrics, newest)


def _check_workers(session: Session, found: Data) -> None:
    """Raises UserError when workers are about to do different things, or in different folders."""
    if session.alone:
        return
    said = {
        'set of training records': found.train.digest,  # before the config, which has the digests too
        'set of evaluation records': found.evaluation.digest,
        'config': hashlib.sha256(config_lib.to_json(session.asked.config).encode()).hexdigest(),
    }
    cluster.check_agreement(session.strategy, session.workers, said)
    if session.asked.dry_run:
        return
    token = session.as_the_chief_says(int(session.lease.token, 16) if session.lease else 0)
    sees = lock.sees(session.asked.workdir, f'{token:0{2 * lock.TOKEN_BYTES}x}')
    cluster.check_shared(session.strategy, session.workers, session.asked.workdir, sees)


def _make_parts(session: Session, found: Data) -> _Parts:
    """The experiment, its optimizers and trainer, their checkpoints, and its view of the data that was found."""
    asked, config = session.asked, session.asked.config
    # Here, so that it does not matter what was made before: names of layers, and initial weights, are always the same.
    keras.utils.clear_session()
    keras.utils.set_random_seed(config.train.seed)
    devices.set_precision(config.train.precision)  # clear_session forgets it
    if config.train.deterministic:
        tf.config.experimental.enable_op_determinism()
    step = host_counter()
    how_to_go_on = f'The checkpoints are in {asked.workdir}. Go on with: {asked.command}'
    remedy = devices.remedy_for_a_stall(session.strategy, session.alone)
    watch = Watch(step, config.devices.stall_seconds, how_to_go_on, remedy)
    with session.strategy.scope():
        experiment = make_experiment(asked.module, config)
        data = found.for_batches(experiment.update_names(config.train))
        optimizers = {
            each.name: make_optimizer(each.optimizer, config.train.steps, each.variables, each.updates)
            for each in experiment.objectives
        }

        def say_skipped(steps: list[int]) -> None:
            for step in steps:
                session.say(
                    f'WARNING: the loss or gradient of step {step} is not finite; it changed nothing. Its records:'
                )
                session.say(plan.feed_text(data, step, session.replicas, most=None))

        training = Training(
            experiment,
            optimizers,
            seed=config.train.seed,
            microbatches=config.train.microbatches,
            update_order=config.train.update_order,
            fresh_batches=config.train.fresh_batches,
            communication=devices.communication_options(config.devices),
        )
        skip, most_in_a_row = config.train.on_nonfinite == 'skip', config.train.max_nonfinite
        nonfinite = NonFinite(skip, most_in_a_row, list(optimizers), say_skipped)
        trainer = Trainer(
            session.strategy,
            training,
            nonfinite,
            config.log.every,
            step,
            watch,
            count_skipped=data.bad.skip,
            deterministic=config.train.deterministic,
        )
    checkpoints = Checkpoints(
        asked.workdir / 'checkpoints',
        State(trainer.step, experiment, optimizers, trainer.sums),
        config.checkpoint.keep,
        in_background=config.checkpoint.async_save,
        writes=session.workers.chief,
        keeps_best=bool(config.checkpoint.best_metric),
        check=session.check_workdir,
    )
    contest = Contest.of(config, workdir_lib.ARITHMETIC)
    best = BestCheckpoint(checkpoints, contest, session.as_the_chief_says, session.workers.chief)
    source, eval_source = (records.make_source(each, experiment, data.bad) for each in (data.train, data.evaluation))
    return _Parts(experiment, trainer, watch, checkpoints, best, data, source, eval_source)


def _restore(session: Session, checkpoints: Checkpoints) -> tuple[int, str | None]:
    """Restores the run's newest checkpoint, or else begins with another's weights; the step, and whose weights."""
    asked = session.asked
    with session.strategy.scope(), session.clock.during('restore'):
        step = checkpoints.choose(session.say, touch=not asked.dry_run) if session.workers.chief else 0
        step = session.as_the_chief_says(step)
        checkpoints.restore(step)
        if step or not asked.config.train.init_checkpoint:
            return step, None
        path = find_checkpoint(asked.config.train.init_checkpoint)
        checkpoints.state.load_weights(path)
        if not session.alone:  # each has read for itself, and nothing would make them equal afterwards
            said = {'weights of train.init_checkpoint': checkpoints.state.weights_digest()}
            cluster.check_agreement(session.strategy, session.workers, said)
        return step, path


def _make_evaluator(session: Session, parts: _Parts, agreement: Agreement) -> Evaluator:
    """The evaluator with its input, traced: what is wrong with it is not to be found when hours of steps are done.

    Raises:
      UserError: for an evaluation that cannot be made, or has no number `checkpoint.best_metric`.
    """
    data, config = parts.data, session.asked.config
    eval_fn = pipeline.make_eval_dataset_fn(
        parts.eval_source, config.train.global_batch_size, data.eval_order, data.layout.window_records
    )
    dataset = pipeline.distribute(session.strategy, eval_fn, session.alone and data.pipelines > 1)
    evaluator = Evaluator(session.strategy, parts.experiment, dataset, agreement.check_batch)
    names, best = evaluator.trace(), config.checkpoint.best_metric
    if best and best not in names:
        raise UserError(f'checkpoint.best_metric={best}: {config_lib.nearest(best, names)}')
    return evaluator


def _open_workdir(session: Session, parts: _Parts, numbers: Numbers, step: int) -> None:
    """From here on the workdir is written to: what is left in it of steps after `step` goes."""
    asked, workers = session.asked, session.workers
    if workers.chief:
        session.check_workdir()  # to read the data and trace may have taken minutes
        before, note = workdir_lib.read_config(asked.workdir), workdir_lib.read_note(asked.workdir)  # of the last start
        arithmetic = note.arithmetic if note else 0
        parts.best.go_on(step, Contest.of(before or asked.config, arithmetic), session.say)
        workdir_lib.write_config(asked.workdir, config_lib.to_json(asked.config))
        own_data = parts.data.default is not None
        workdir_lib.write_note(asked.workdir, workdir_lib.Note(asked.experiment or asked.name, own_data))
        parts.checkpoints.clean()
        numbers.drop_after(step if workdir_lib.has_begun(asked.workdir) else -1)
        session.clock.go_on(asked.workdir / 'time.json')
    name = 'bad_records.jsonl' if workers.chief else f'bad_records-{workers.index}.jsonl'
    parts.data.bad.list_in(asked.workdir / name)


def _feed(session: Session, parts: _Parts, step: int) -> None:
    """Gives the trainer its input from `step` on: a distributed iterator cannot be restored, but can start anywhere."""
    train_fn = pipeline.make_train_dataset_fn(parts.source, parts.data.layout, step)
    per_replica = session.alone and parts.data.pipelines > 1
    parts.trainer.train_dataset = pipeline.distribute(session.strategy, train_fn, per_replica)


@contextlib.contextmanager
def _stops_explained(session: Session, parts: _Parts) -> Iterator[None]:
    """Around training: which records a guard stopped at, and how a run that was interrupted goes on."""
    try:
        yield
    except GuardError as error:
        with contextlib.suppress(OSError):  # of a full disk, which may be what it says
            session.clock.write()
        if error.step is not None:
            session.say(plan.feed_text(parts.data, error.step, session.replicas, most=None))
        raise
    except WorkdirLost:
        raise  # nothing was saved, and the same command would find the other run
    except Interrupted as interruption:
        session.clock.write()
        saved = 'nothing was trained yet'
        if parts.checkpoints.newest:
            saved = f'saved at step {int(parts.trainer.step.numpy())}'
        raise Interrupted(f'{interruption}: {saved}. Go on with: {session.asked.command}') from None


def _train(
    session: Session, parts: _Parts, agreement: Agreement, evaluator: Evaluator, numbers: Numbers
) -> dict[str, float]:
    """Orbit's outer loop, from the trainer's step to the last, and what happens between steps; the last evaluation."""
    config, clock, data = session.asked.config, session.clock, parts.data
    trainer, checkpoints, calendar = parts.trainer, parts.checkpoints, Calendar.of(config)
    step, batch_size, first = trainer.step, config.train.global_batch_size, int(trainer.step.numpy())
    draw = parts.experiment.pictures if session.workers.chief else None
    with reporting.Progress(session.console, config.train.steps, first) as progress, parts.watch.watching():
        evaluation = actions.Evaluation(
            evaluator,
            pipeline.eval_steps(data.eval_records, batch_size, data.pipelines),
            calendar,
            numbers,
            progress,
            step,
            clock,
            agreement,
            parts.best,
            Pictures(draw, session.asked.workdir / 'pictures', numbers.tensorboard),
        )
        controller = orbit.Controller(
            global_step=step,
            trainer=trainer,
            strategy=session.strategy,
            steps_per_loop=lambda now: calendar.loop(now, trainer.seconds_per_step),
            train_actions=[
                session.check_workdir,
                actions.TimeAccount(clock, trainer),
                agreement,
                actions.Reporter(numbers, progress, step, batch_size * data.layout.batches_per_step, data.bad),
                actions.Watcher(
                    parts.experiment.objectives, numbers.metrics, step, config.train.watch_steps, session.announce
                ),
                evaluation,
                actions.Saver(calendar, checkpoints, step, agreement, evaluation, clock, numbers),
            ],
            summary_manager=numbers.tensorboard,
            summary_interval=config.log.every,
        )
        session.check()
        due = calendar.due(calendar.evaluate, first) if first else config.eval.at_start
        # Where it is due and not there, the run was interrupted in it, or it failed.
        if session.as_the_chief_says(due and not numbers.metrics.has(first, 'eval')):
            evaluation.now()
            evaluation.check()
            agreement.check()  # it may have been interrupted again
        try:
            controller.train(config.train.steps)
        except BaseException:
            checkpoints.abandon(session.say)  # for the workdir is given back, and another may have it next
            raise
        with clock.during('save'):
            checkpoints.finish()
        clock.saved()
        agreement.wait_for_all()  # none leaves before the chief has written
    return evaluation.newest


def _print_summary(session: Session, parts: _Parts, metrics: workdir_lib.MetricsFile, newest: dict[str, float]) -> None:
    """How the run came out."""
    data = parts.data
    at_start = next((line for line in metrics.read('eval') if line['step'] == 0), {})
    reporting.print_summary(
        session.console,
        session.asked.workdir,
        parts.checkpoints.newest,
        newest,
        {name: value for name, value in at_start.items() if isinstance(value, float)},
        data.default.references if data.default else {},
        bad_records=str(data.bad) if data.bad.skip else None,
        time=as_text(session.clock.seconds),
    )
