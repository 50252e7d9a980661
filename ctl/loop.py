"""A run from its first line to its last, in the order things happen."""

import contextlib
import dataclasses
import hashlib
import os
import pathlib
import types
from collections.abc import Callable

import keras
import ml_collections
import orbit
import rich.console
import rich.markup
import tensorflow as tf

from ctl import config as config_lib
from ctl.data import pipeline, records
from ctl.data.bad_records import BadRecords
from ctl.data.inputs import Data, choose_data, find_data
from ctl.errors import GuardError, Interrupted
from ctl.nonfinite import NonFinite
from ctl.optimizers import make_optimizer
from ctl.runtime import cluster, devices, lock, plan, reporting, signals
from ctl.runtime import workdir as workdir_lib
from ctl.runtime.actions import Account, Best, Calendar, Evaluate, Report, Save, Together
from ctl.runtime.checkpoints import Checkpoints, find_checkpoint
from ctl.runtime.clock import Clock, as_text
from ctl.step import Evaluator, Trainer


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
      command: what was typed, for the message on how to go on.
    """

    name: str
    module: types.ModuleType
    config: ml_collections.ConfigDict
    workdir: pathlib.Path
    dry_run: bool = False
    break_lock: bool = False
    command: str = ''


def run(asked: Run) -> None:
    """Trains an experiment up to step `config.train.steps`, from wherever the workdir left off.

    Raises:
      UserError: when what the user gave cannot be run.
      GuardError: when a guard stopped the run.
      Interrupted: when a signal did.
    """
    clock = Clock()
    devices_config = asked.config.devices
    workers = cluster.ALONE
    if devices_config.strategy == 'multi_worker':
        workers = cluster.read_cluster(os.environ)
    console = reporting.make_console(quiet=not workers.chief)
    prefix = '' if workers.chief else f'worker {workers.index}: '

    def say(text: str) -> None:
        rich.print(rich.markup.escape(prefix + text)) if prefix else console.print(text, markup=False)

    strategy = devices.make_strategy(devices_config, workers, say)  # before any other TensorFlow object
    keras.utils.clear_session()  # layers without a name get the same one in every process; it forgets the precision
    devices.set_precision(asked.config.train.precision)
    keras.utils.set_random_seed(asked.config.train.seed)
    owned = lock.owned(asked.workdir, say, asked.break_lock)
    if asked.dry_run or not workers.chief:
        owned = contextlib.nullcontext()
    with signals.Stop().watching() as stop, owned:
        try:
            _run(asked, strategy, workers, console, say, stop, clock)
        except tf.errors.OpError as error:
            interruption = cluster.explain_loss(error, workers)
            if interruption is None:
                raise
            newest = Checkpoints.newest_in(asked.workdir / 'checkpoints')
            raise Interrupted(
                f'{interruption}: the newest checkpoint is {newest or "none"}. Go on with: {asked.command}'
            ) from None


def _run(
    asked: Run,
    strategy: tf.distribute.Strategy,
    workers: cluster.Cluster,
    console: rich.console.Console,
    say: Callable[[str], None],
    stop: signals.Stop,
    clock: Clock,
) -> None:
    config, workdir, replicas = asked.config, asked.workdir, strategy.num_replicas_in_sync
    default_data = choose_data(asked.name, asked.module, config, say)
    config_lib.resume(config, workdir_lib.read_config(workdir))
    bad = BadRecords(config.data, say)
    data = find_data(config, replicas, default_data, bad, console, len(workers.addresses))
    _check_workers(strategy, workers, config, data)

    def say_skipped(steps: list[int]) -> None:
        for step in steps:
            say(f'WARNING: the loss or gradient of step {step} is not finite; it changed nothing. Its records:')
            say(plan.feed_text(data, step, replicas, most=None))

    with strategy.scope():
        experiment = asked.module.make_experiment(config)
        optimizers = {
            each.name: make_optimizer(each.optimizer, config.train.steps, each.variables, each.updates)
            for each in experiment.objectives
        }
        trainer = Trainer(
            strategy,
            experiment,
            optimizers,
            seed=config.train.seed,
            microbatches=config.train.microbatches,
            report_every=config.log.every,
            nonfinite=NonFinite(config.train.on_nonfinite == 'skip', config.train.max_nonfinite),
            on_skipped=say_skipped,
            count_skipped=bad.skip,
            communication=devices.communication_options(config.devices.all_reduce),
        )
    source, eval_source = (records.make_source(index, experiment, bad) for index in (data.train, data.evaluation))
    checkpoints = Checkpoints(
        workdir / 'checkpoints',
        trainer.step,
        experiment,
        optimizers,
        trainer.sums,
        keep=config.checkpoint.keep,
        in_background=config.checkpoint.async_save,
        writes=workers.chief,
    )
    with strategy.scope(), clock.during('restore'):
        step = checkpoints.choose(say, touch=not asked.dry_run) if workers.chief else 0
        if workers is not cluster.ALONE:
            step = int(cluster.gather(strategy, [step])[0, 0])
        checkpoints.restore(step)
        started_from = None if step else _warm_start(config, checkpoints)

    plan.print_plan(
        console,
        {
            'experiment': asked.name,
            **plan.device_rows(config, strategy, workers),
            **plan.data_rows(config, data),
            **plan.bad_rows(config, bad),
            **plan.model_rows(experiment, config.train.steps),
            **plan.run_rows(workdir, checkpoints, step, config.train.steps, started_from),
        },
    )
    calendar, metrics = Calendar.of(config), workdir_lib.MetricsFile(workdir, writes=workers.chief)
    if asked.dry_run:
        say(plan.feed_text(data, step, replicas))
        say('Dry run: the run could start. Nothing was trained, and nothing written to the workdir.')
        return
    if step >= config.train.steps and metrics.has(step, 'eval'):
        say(f'Already at step {step} of {config.train.steps}. A larger --config.train.steps goes on from here.')
        return

    if workers.chief:
        workdir_lib.write_config(workdir, config_lib.to_json(config))
        checkpoints.clean()
        metrics.drop_after(step)
        clock.go_on(workdir / 'time.json')
    bad.keep(workdir / ('bad_records.jsonl' if workers.chief else f'bad_records-{workers.index}.jsonl'))
    train_fn = pipeline.make_train_dataset_fn(source, data.layout, step)
    eval_fn = pipeline.make_eval_dataset_fn(
        eval_source, config.train.global_batch_size, data.eval_records, data.layout.window_records
    )
    # Only now is it known which step comes next: a distributed iterator cannot be restored, but it can start anywhere.
    per_replica = workers is cluster.ALONE and data.pipelines > 1
    trainer.train_dataset = pipeline.distribute(strategy, train_fn, per_replica)
    eval_dataset = pipeline.distribute(strategy, eval_fn, per_replica)
    # Workers evaluate together to the end: they agree on when to stop between inner loops.
    check = stop.check if workers is cluster.ALONE else lambda: None
    evaluator = Evaluator(strategy, experiment.objectives, eval_dataset, check)
    try:
        with records.explained(source, eval_source):
            newest = _train(
                config, console, data, workers, trainer, evaluator, checkpoints, calendar, metrics, bad, stop, clock
            )
    except GuardError as error:
        if error.step is not None:
            say(plan.feed_text(data, error.step, replicas, most=None))
        raise
    except Interrupted as interruption:
        saved = f'saved at step {int(trainer.step.numpy())}' if checkpoints.newest else 'nothing was trained yet'
        raise Interrupted(f'{interruption}: {saved}. Go on with: {asked.command}') from None
    references = data.default.references if data.default else {}
    lost = str(bad) if bad.skip else None
    reporting.print_summary(console, workdir, checkpoints.newest, newest, references, lost, as_text(clock.seconds))


def _check_workers(
    strategy: tf.distribute.Strategy, workers: cluster.Cluster, config: ml_collections.ConfigDict, data: Data
) -> None:
    """Raises UserError when workers are about to do different things."""
    if workers is cluster.ALONE:
        return
    said = {
        'config': hashlib.sha256(config_lib.to_json(config).encode()).hexdigest(),
        'set of training records': data.train.digest,
        'set of evaluation records': data.evaluation.digest,
    }
    cluster.check_agreement(strategy, workers, said)


def _warm_start(config: ml_collections.ConfigDict, checkpoints: Checkpoints) -> str | None:
    """Takes the weights of train.init_checkpoint, where this run has no checkpoint of its own; returns its path."""
    if not config.train.init_checkpoint or checkpoints.newest:
        return None
    path = find_checkpoint(config.train.init_checkpoint)
    checkpoints.load_weights(path)
    return path


def _train(
    config: ml_collections.ConfigDict,
    console: rich.console.Console,
    data: Data,
    workers: cluster.Cluster,
    trainer: Trainer,
    evaluator: Evaluator,
    checkpoints: Checkpoints,
    calendar: Calendar,
    metrics: workdir_lib.MetricsFile,
    bad: BadRecords,
    stop: signals.Stop,
    clock: Clock,
) -> dict[str, float]:
    """Orbit's outer loop, from the trainer's step to the last, and what happens between steps; the last evaluation."""
    step, batch_size = trainer.step, config.train.global_batch_size
    eval_steps = pipeline.eval_steps(data.eval_records, batch_size, data.pipelines)
    first, workdir = int(step.numpy()), metrics.workdir
    with reporting.Progress(console, config.train.steps, first) as progress:
        best = Best(checkpoints, config.checkpoint.best_metric, config.checkpoint.best_mode)
        evaluate = Evaluate(calendar, metrics, progress, step, eval_steps, best, clock)
        controller = orbit.Controller(
            global_step=step,
            trainer=trainer,
            evaluator=evaluator,
            strategy=trainer.strategy,
            steps_per_loop=lambda now: calendar.loop(now, trainer.seconds_per_step),
            train_actions=[
                Account(clock, trainer),
                Together(trainer.strategy, workers, stop, trainer),
                Report(metrics, progress, step, batch_size, bad),
                evaluate,
                Save(calendar, checkpoints, step, stop, clock),
            ],
            summary_dir=str(workdir / 'tensorboard' / 'train') if workers.chief else None,
            eval_summary_dir=str(workdir / 'tensorboard' / 'eval') if workers.chief else None,
            summary_interval=config.log.every,
        )
        evaluate.controller = controller
        if workers is cluster.ALONE:
            stop.check()
        if first and not metrics.has(first, 'eval'):
            evaluate({})  # where it is due: the run was interrupted in it
        controller.train(config.train.steps)
        with clock.during('save'):
            checkpoints.finish()
        clock.saved()
        if workers is not cluster.ALONE:
            cluster.gather(trainer.strategy, [0])  # none leaves before the chief has written
    return evaluate.newest
