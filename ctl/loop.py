"""A run from its first line to its last, in the order things happen."""

import functools
import pathlib
import types

import keras
import ml_collections
import orbit
import rich.console

from ctl import config as config_lib
from ctl.data import pipeline, records
from ctl.data.bad_records import BadRecords
from ctl.data.inputs import Data, choose_data, find_data
from ctl.errors import GuardError
from ctl.optimizers import make_optimizer
from ctl.runtime import devices, plan, reporting
from ctl.runtime import workdir as workdir_lib
from ctl.runtime.actions import Calendar, Evaluate, Report, Save
from ctl.runtime.checkpoints import Checkpoints
from ctl.step import Evaluator, Trainer


def run(
    name: str,
    module: types.ModuleType,
    config: ml_collections.ConfigDict,
    workdir: pathlib.Path,
    dry_run: bool = False,
) -> None:
    """Trains an experiment up to step `config.train.steps`, from wherever `workdir` left off.

    Args:
      name: the experiment's.
      module: its file: get_config(), make_experiment(config), perhaps make_default_data(config).
      config: validated; takes the values that are chosen here, in place.
      workdir: where config.json, metrics.jsonl, checkpoints/ and tensorboard/ are, or will be.
      dry_run: print the plan, check that the run could start, write nothing in `workdir`, stop.

    Raises:
      UserError: when what the user gave cannot be run.
      GuardError: when a guard stopped the run.
    """
    console = reporting.make_console()
    say = functools.partial(console.print, markup=False)
    strategy = devices.make_strategy(config.devices)  # before any other TensorFlow object
    keras.utils.clear_session()  # layers without a name get the same one in every process; it forgets the precision
    devices.set_precision(config.train.precision)
    keras.utils.set_random_seed(config.train.seed)

    default_data = choose_data(name, module, config, say)
    config_lib.resume(config, workdir_lib.read_config(workdir))
    bad = BadRecords(config.data, say)
    data = find_data(config, strategy.num_replicas_in_sync, default_data, bad, console)

    with strategy.scope():
        experiment = module.make_experiment(config)
        optimizers = {
            each.name: make_optimizer(each.optimizer, config.train.steps, each.variables, each.updates)
            for each in experiment.objectives
        }
        trainer = Trainer(
            strategy,
            experiment.objectives,
            optimizers,
            seed=config.train.seed,
            microbatches=config.train.microbatches,
            report_every=config.log.every,
            count_skipped=bad.skip,
            communication=devices.communication_options(config.devices.all_reduce),
        )
    source, eval_source = (records.make_source(index, experiment, bad) for index in (data.train, data.evaluation))
    checkpoints = Checkpoints(
        workdir / 'checkpoints', config.checkpoint.keep, trainer.step, experiment, optimizers, trainer.sums
    )
    with strategy.scope():
        step = checkpoints.restore()

    plan.print_plan(
        console,
        {
            'experiment': name,
            **plan.device_rows(config, strategy),
            **plan.data_rows(config, data),
            **plan.bad_rows(config, bad),
            **plan.model_rows(experiment, config.train.steps),
            **plan.run_rows(workdir, checkpoints.newest, step, config.train.steps),
        },
    )
    if dry_run:
        say(plan.feed_text(data, step, strategy.num_replicas_in_sync))
        console.print('Dry run: the run could start. Nothing was trained, and nothing written to the workdir.')
        return
    if step >= config.train.steps:
        console.print(
            f'Already at step {step} of {config.train.steps}. A larger --config.train.steps goes on from here.'
        )
        return

    workdir_lib.write_config(workdir, config_lib.to_json(config))
    bad.keep(workdir / 'bad_records.jsonl')
    train_fn = pipeline.make_train_dataset_fn(source, data.layout, step)
    eval_fn = pipeline.make_eval_dataset_fn(
        eval_source, config.train.global_batch_size, data.eval_records, data.layout.window_records
    )
    # Only now is it known which step comes next: a distributed iterator cannot be restored, but it can start anywhere.
    trainer.train_dataset = pipeline.distribute(strategy, train_fn, per_replica=data.pipelines > 1)
    eval_dataset = pipeline.distribute(strategy, eval_fn, per_replica=data.pipelines > 1)
    evaluator = Evaluator(strategy, experiment.objectives, eval_dataset)
    try:
        with records.explained(source, eval_source):
            newest = _train(config, workdir, console, data, trainer, evaluator, checkpoints, bad)
    except GuardError as error:
        if error.step is not None:
            say(plan.feed_text(data, error.step, strategy.num_replicas_in_sync, most=None))
        raise
    references = data.default.references if data.default else {}
    reporting.print_summary(console, workdir, checkpoints.newest, newest, references, str(bad) if bad.skip else None)


def _train(
    config: ml_collections.ConfigDict,
    workdir: pathlib.Path,
    console: rich.console.Console,
    data: Data,
    trainer: Trainer,
    evaluator: Evaluator,
    checkpoints: Checkpoints,
    bad: BadRecords,
) -> dict[str, float]:
    """Orbit's outer loop, from the trainer's step to the last, and what happens between steps; the last evaluation."""
    calendar, step = Calendar.of(config), trainer.step
    batch_size = config.train.global_batch_size
    eval_steps = pipeline.eval_steps(data.eval_records, batch_size, data.pipelines)
    metrics = workdir_lib.MetricsFile(workdir, int(step.numpy()))
    with reporting.Progress(console, config.train.steps, int(step.numpy())) as progress:
        evaluate = Evaluate(calendar, metrics, progress, step, eval_steps)
        controller = orbit.Controller(
            global_step=step,
            trainer=trainer,
            evaluator=evaluator,
            strategy=trainer.strategy,
            steps_per_loop=calendar.loop,
            train_actions=[
                Report(metrics, progress, step, batch_size, bad),
                evaluate,
                Save(calendar, checkpoints, step),
            ],
            summary_dir=str(workdir / 'tensorboard' / 'train'),
            eval_summary_dir=str(workdir / 'tensorboard' / 'eval'),
            summary_interval=config.log.every,
        )
        evaluate.controller = controller
        controller.train(config.train.steps)
    return evaluate.newest
