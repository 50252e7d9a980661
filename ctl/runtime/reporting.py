"""What a person sees while a run goes on, and how TensorFlow's and Orbit's own chatter is kept down."""

import logging
import pathlib
import sys
from collections.abc import Mapping

import absl.logging
import orbit.controller
import rich.console
import rich.progress

from ctl.commands import command


def make_console(quiet: bool = False) -> rich.console.Console:
    """Standard output: 80 columns or the terminal's; 120 where it is no terminal, so that tables keep their shape."""
    terminal = sys.stdout.isatty()
    return rich.console.Console(
        file=sys.stdout,
        force_terminal=terminal,  # and not as FORCE_COLOR says: a bar has no place in a log
        width=None if terminal else 120,
        highlight=False,
        soft_wrap=True,  # a terminal wraps by itself, and what is copied from it is one line
        quiet=quiet,
    )


def quiet(verbosity: int) -> None:
    """Lets Python logs of `verbosity` (absl's: -1 warnings, 0 info, 1 debug) and above through, Orbit's as well."""
    absl.logging.set_verbosity(verbosity)
    logging.getLogger('tensorflow').setLevel(logging.ERROR if verbosity < 0 else logging.INFO)
    # Orbit prints everything it logs; its only way out is this private name. Were it renamed, Orbit would be noisy.
    orbit.controller._log = absl.logging.info


class Progress:
    """A rich progress bar on a terminal; elsewhere a plain line for every report and evaluation."""

    def __init__(self, console: rich.console.Console, steps: int, step: int):
        """`steps` in the whole run, of which `step` are done."""
        self._console, self._steps = console, steps
        self._bar = None
        if console.is_terminal:
            self._bar = rich.progress.Progress(
                rich.progress.TextColumn('step {task.completed:.0f}/{task.total:.0f}'),
                rich.progress.BarColumn(),
                rich.progress.TextColumn('{task.fields[text]}'),
                rich.progress.TextColumn('ETA'),
                rich.progress.TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task('train', total=steps, completed=step, text='tracing the step')

    def __enter__(self) -> 'Progress':
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *exception) -> None:
        if self._bar:
            self._bar.stop()

    def train(self, step: int, report: dict) -> None:
        """`report` is empty between reports."""
        text = f'{_losses_text(report)}  {report["examples_per_second"]:.1f} examples/s' if report else None
        if self._bar:
            self._bar.update(self._task, completed=step, **({'text': text} if text else {}))
        elif text:
            self._console.print(f'step {step}/{self._steps}  {text}')

    def evaluation(self, step: int, values: dict) -> None:
        """Says how an evaluation came out."""
        self._console.print(
            f'eval at step {step}  ' + '  '.join(f'{name} {value:.4f}' for name, value in values.items())
        )


def _losses_text(report: Mapping[str, float]) -> str:
    """The objective of each player, or where there is one, the loss."""
    players = {name.removesuffix('_objective'): v for name, v in report.items() if name.endswith('_objective')}
    return '  '.join(f'{name} {value:.4f}' for name, value in (players or {'loss': report['loss']}).items())


def print_summary(
    console: rich.console.Console,
    workdir: pathlib.Path,
    checkpoint: str,
    values: Mapping[str, float],
    at_start: Mapping[str, float],
    references: Mapping[str, tuple[float, str]],
    bad_records: str | None,
    time: str,
) -> None:
    """How the run came out, against what it has to beat, what was lost, and where everything is and the time went.

    `values` are of the last evaluation, `at_start` of one at step 0, empty for none.
    """
    lines = ['', 'Done. The last evaluation:']
    for name, value in values.items():
        against = [f'at step 0: {at_start[name]:.4f}'] if name in at_start else []
        against += [f'{references[name][1]}: {references[name][0]:.4f}'] if name in references else []
        lines.append(f'  {name:<24} {value:.4f}' + (f'   ({"; ".join(against)})' if against else ''))
    lines += [f'  bad records   {bad_records}'] if bad_records else []
    lines += [
        f'  weights       {checkpoint}',
        f'  metrics       {workdir / "metrics.jsonl"}',
        f'  config        {workdir / "config.json"}',
        *([f'  pictures      {workdir / "pictures"}'] if (workdir / 'pictures').exists() else []),
        f'  TensorBoard   {command("tensorboard.main", "--logdir", workdir / "tensorboard")}',
        f'  time          {time}',
    ]
    console.print('\n'.join(lines), markup=False)
