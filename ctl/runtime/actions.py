"""What happens between steps: report, evaluate, save, in that order, each when it is due.

Orbit calls these after every inner loop. The order matters to a resumed run: a checkpoint of step k means that the
report of step k is written, and its evaluation too, unless that was interrupted or failed; then it comes first.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import ml_collections
import tensorflow as tf

from ctl.data.bad_records import BadRecords
from ctl.errors import GuardError, Interrupted
from ctl.evaluator import Evaluator
from ctl.experiment import Objective
from ctl.runtime.agreement import Agreement
from ctl.runtime.best import BestCheckpoint
from ctl.runtime.checkpoints import Checkpoints
from ctl.runtime.clock import Clock
from ctl.runtime.pictures import Pictures
from ctl.runtime.reporting import Progress
from ctl.runtime.tensorboard import TensorBoard
from ctl.runtime.workdir import MetricsFile
from ctl.step import Trainer

# The longest that an inner loop takes.
LOOP_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Calendar:
    """When things are due, in steps.

    Attributes:
      steps: the last step.
      report, evaluate, save: steps between; 0 is only at the end.
      longest_loop: most steps in one inner loop.
    """

    steps: int
    report: int
    evaluate: int
    save: int
    longest_loop: int

    @classmethod
    def of(cls, config: ml_collections.ConfigDict) -> 'Calendar':
        return cls(
            config.train.steps,
            config.log.every,
            config.eval.every,
            config.checkpoint.every,
            config.train.steps_per_loop,
        )

    def loop(self, step: int, seconds_per_step: float | None) -> int:
        """Steps in the inner loop that starts at `step`: up to the next point where something is due.

        It takes some seconds at most, for a signal is only heard at its end; the first is one step, to learn how long
        they take.
        """
        points = [every - step % every for every in (self.report, self.evaluate, self.save) if every]
        quick = 1 if seconds_per_step is None else max(1, int(LOOP_SECONDS / seconds_per_step))
        return min(self.longest_loop, self.steps - step, quick, *points)

    def due(self, every: int, step: int) -> bool:
        return step == self.steps or bool(every and step % every == 0)


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Where the numbers of reports and evaluations are written down."""

    metrics: MetricsFile
    tensorboard: TensorBoard

    def write(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Writes those of one step, of kind 'train' or 'eval'."""
        # The line last: with it, the evaluation of a step is done, and does not come again.
        self.tensorboard.scalars(kind, step, values)
        self.metrics.append(step=step, kind=kind, **values)

    def sync(self) -> None:
        """Before a checkpoint: it says that the numbers of its step, and before, are written."""
        self.metrics.sync()
        self.tensorboard.flush()

    def drop_after(self, step: int) -> None:
        """Drops what a killed run wrote after `step`, its last checkpoint: those steps come again."""
        self.metrics.drop_after(step)
        self.tensorboard.drop_after(step, evaluated=self.metrics.has(step, 'eval'))


class Reporter:
    """Writes the means since the last report down and shows them, when the trainer has any."""

    def __init__(self, numbers: Numbers, progress: Progress, step: tf.Variable, examples: int, bad: BadRecords):
        """`examples` in a step."""
        self._numbers, self._progress, self._step, self._examples = numbers, progress, step, examples
        self._bad = bad

    def __call__(self, output: dict) -> None:
        step = int(self._step.numpy())
        if output:
            output['examples_per_second'] = output.pop('steps_per_second') * self._examples
            output['examples'] = step * self._examples
            if self._bad.skip:
                output['damaged_records'] = self._bad.damaged
            self._numbers.write('train', step, output)
        self._progress.train(step, output)


class Watcher:
    """Says what it means when a watched metric stays at 0 or 1, once each time it begins to."""

    # A mean over the steps since the last report counts as 0 or 1 within this.
    MARGIN = 0.01

    def __init__(
        self,
        objectives: Sequence[Objective],
        metrics: MetricsFile,
        step: tf.Variable,
        steps: int,
        say: Callable[[str], None],
    ):
        """`steps` that it may stay there; 0 is for ever. Where the run goes on, its earlier reports count."""
        self._meanings = {name: meanings for objective in objectives for name, meanings in objective.watched.items()}
        self._step, self._steps, self._say = step, steps, say
        self._pinned_since: dict[str, int | None] = dict.fromkeys(self._meanings)
        self._before = 0
        for line in metrics.read('train'):
            self._look(line['step'], line, silent=True)

    def __call__(self, output: dict) -> None:
        if output:
            self._look(int(self._step.numpy()), output)

    def _look(self, step: int, report: Mapping, silent: bool = False) -> None:
        for name, meanings in self._meanings.items():
            value, since = report.get(name), self._pinned_since[name]
            if value is None or self.MARGIN < value < 1 - self.MARGIN:
                self._pinned_since[name] = None
                continue
            since = self._before if since is None else since
            self._pinned_since[name] = since
            said = self._before - since >= self._steps
            if self._steps and step - since >= self._steps and not said and not silent:
                self._say(f'WARNING: {name} has been {round(value)} since step {since}: {meanings[round(value)]}')
        self._before = step


class TimeAccount:
    """Says where the time of an inner loop went. The first is start-up: the step is traced in it."""

    def __init__(self, clock: Clock, trainer: Trainer):
        self._clock, self._trainer, self._first = clock, trainer, True

    def __call__(self, output: dict) -> None:
        waited = self._trainer.take_input_seconds()
        if self._first:
            self._clock.enter('step')
            self._first = False
        else:
            self._clock.move(waited, 'step', 'input wait')
        self._clock.write_now_and_then()


class Evaluation:
    """Evaluates when it is due, and writes down what came of it.

    Attributes:
      newest: the values of the last one of this process, by name; None before the first.
      failure: what went wrong in the last one, on this worker or another; the saver raises it when it has saved.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        batches: int,
        calendar: Calendar,
        numbers: Numbers,
        progress: Progress,
        step: tf.Variable,
        clock: Clock,
        agreement: Agreement,
        best: BestCheckpoint,
        pictures: Pictures,
    ):
        """`batches` are the steps of one evaluation."""
        self._evaluator, self._batches, self._calendar = evaluator, batches, calendar
        self._numbers, self._progress, self._step, self._clock = numbers, progress, step, clock
        self._agreement, self._best, self._pictures = agreement, best, pictures
        self.newest: dict[str, float] | None = None
        self.failure: Exception | None = None

    def __call__(self, output: dict) -> None:
        if self._calendar.due(self._calendar.evaluate, int(self._step.numpy())):
            self.now()

    def now(self) -> None:
        """Evaluates at the step that training has come to."""
        step, failure = int(self._step.numpy()), None
        try:
            values = self._measure(step)
        except Interrupted:
            return  # the saver hears of it next, and the evaluation comes when the run goes on
        except Exception as error:  # also a bug of the experiment's
            if (
                isinstance(error, tf.errors.OpError)
                and not self._agreement.alone
                and error is not self._evaluator.unread
            ):
                raise  # in the middle: the other workers wait for this one's sums, and could agree on nothing
            failure = error
        self.failure = self._agreement.failure(failure)
        if self.failure:
            return
        # Before the line: a run that is killed between the two evaluates this step again.
        if self._best(values):
            self._agreement.wait_for_all()  # likewise, as after every save
        self._numbers.write('eval', step, values)
        self._progress.evaluation(step, values)
        self.newest = values

    def _measure(self, step: int) -> dict[str, float]:
        # As Orbit would, for what an experiment writes by tf.summary in an evaluation.
        with self._clock.during('eval'), self._numbers.tensorboard.writer('eval').as_default(step=step):
            self._agreement.begin_evaluation()
            values = self._evaluator.evaluate(tf.constant(self._batches))
            self._pictures.draw(step)
        if not math.isfinite(values['loss']):
            raise GuardError(f'the evaluation at step {step} has the loss {values["loss"]}: look at {values}.')
        return values

    def check(self) -> None:
        """Raises what went wrong in the last one."""
        if self.failure:
            raise self.failure


class Saver:
    """Writes a checkpoint when it is due, or when the run is to end."""

    def __init__(
        self,
        calendar: Calendar,
        checkpoints: Checkpoints,
        step: tf.Variable,
        agreement: Agreement,
        evaluation: Evaluation,
        clock: Clock,
        numbers: Numbers,
    ):
        self._calendar, self._checkpoints, self._step, self._agreement = calendar, checkpoints, step, agreement
        self._evaluation, self._clock, self._numbers = evaluation, clock, numbers

    def __call__(self, output: dict) -> None:
        asked = self._agreement.asked_to_end
        ends = asked or self._evaluation.failure
        if ends or self._calendar.due(self._calendar.save, int(self._step.numpy())):
            self._clock.write()  # a kill in the middle of the save leaves what was done before it
            with self._clock.during('save'):
                self._numbers.sync()
                self._checkpoints.save()
                if ends:
                    self._checkpoints.finish()
            self._clock.saved()
            # The chief writes for all. Who went on would wait for it in the next step, and take that for a stall.
            self._agreement.wait_for_all()
        self._evaluation.check()
        if asked:
            raise Interrupted(f'{asked} received')  # one that came since is heard after the next loop
