"""The checkpoint with the best value of one metric: in `checkpoints/best`, and `best.json` beside it says of what."""

import json
import math
import shutil
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ctl.errors import UserError
from ctl.files import replace_text
from ctl.runtime.checkpoints import Checkpoints, keep_only, steps_in


class Contest(NamedTuple):
    """By what the best is chosen: with a value of another contest, none is compared.

    Attributes:
      metric: '' keeps none.
      mode: 'min' or 'max'.
      evaluation: of which records, and made how: the same for evaluations that compare.
    """

    metric: str
    mode: str
    evaluation: str

    @classmethod
    def of(cls, config: Mapping, arithmetic: int) -> 'Contest':
        """That of a run with a config, or `config.json`; `arithmetic` as `workdir.Note` has it."""
        checkpoint, steps = config['checkpoint'], config['eval']['steps']
        evaluation = config['data'].get('eval_digest', '')
        if evaluation and (steps > 0 or checkpoint['best_metric'] == 'kernel_distance'):  # over a sample
            evaluation += f' eval.steps={steps} arithmetic={arithmetic}'
        return cls(checkpoint['best_metric'], checkpoint.get('best_mode', 'min'), evaluation)

    def compares(self, noted: Mapping) -> bool:
        """Whether the value in a `best.json` is of this contest."""
        return (noted['metric'], noted['mode'], noted['evaluation']) == self


class BestCheckpoint:
    """Keeps the checkpoint of the best evaluation so far."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        contest: Contest,
        as_the_chief_says: Callable[[int], int] = lambda number: number,
        writes: bool = True,
    ):
        """`as_the_chief_says` gives all workers the chief's number: they save together, or not at all.

        Of several workers one `writes`, and alone knows what was the best before.
        """
        self._checkpoints, self._contest, self._writes = checkpoints, contest, writes
        self._folder = checkpoints.best_folder
        self._as_the_chief_says = as_the_chief_says
        self._best: float | None = None
        self._say: Callable[[str], None] = print

    def go_on(self, step: int, before: Contest, say: Callable[[str], None]) -> None:
        """Takes up the best so far of a run that goes on from `step`.

        Removes what there is of later steps, and what a kill has left. Says so where what is there is the best of
        another contest: it stays until the next evaluation. `before` is the contest that the run had, for a `best.json`
        of a version that noted less of it.
        """
        self._say = say
        best = self._read()
        if not best or best['step'] > step:
            if best:
                say(
                    f'WARNING: {self._folder} held step {best["step"]}, and the run goes on from step {step}: removed. '
                    'The best is chosen from the evaluations that come.'
                )
                (self._folder / 'best.json').unlink()  # first: a kill must leave none without its checkpoint
            shutil.rmtree(self._folder, ignore_errors=True)
            return
        keep_only(self._folder, best['step'])
        noted = {'mode': before.mode, 'evaluation': before.evaluation or self._contest.evaluation, **best}
        if noted != best:
            self._note(noted)
        if self._contest.compares(noted):
            self._best = noted['value'] if math.isfinite(noted['value']) else None
        elif self._contest.metric:
            say(
                f'WARNING: {self._folder} has step {noted["step"]}, the best {noted["metric"]} by '
                f'checkpoint.best_mode={noted["mode"]}{self._other_evaluation(noted)}. It gives way to the best '
                f'{self._contest.metric} by checkpoint.best_mode={self._contest.mode} of the evaluations that come.'
            )

    def _other_evaluation(self, noted: Mapping) -> str:
        return (
            ', of evaluations that may not compare (data.eval, eval.steps or ctl is another)'
            if noted['evaluation'] != self._contest.evaluation
            else ''
        )

    def __call__(self, values: Mapping[str, float]) -> bool:
        """Saves the current step where an evaluation, by its `values`, is the best; whether it was."""
        if not self._contest.metric:
            return False
        value, sign = values[self._contest.metric], 1 if self._contest.mode == 'min' else -1
        if self._writes and not math.isfinite(value):
            self._say(f'WARNING: {self._contest.metric} is {value}: this evaluation can be no best.')
        better = self._best is None or sign * value < sign * self._best
        if not self._as_the_chief_says(int(better and math.isfinite(value))):
            return False
        self._best = value
        step = self._checkpoints.write_best()
        if self._writes:
            self._note({'step': step, 'value': value, **self._contest._asdict()})
            keep_only(self._folder, step)
        return True

    def _read(self) -> dict:
        """`best.json`; empty where there is none, or not the checkpoint that it names."""
        try:
            best = json.loads((self._folder / 'best.json').read_text())
            there = best['step'] in steps_in(self._folder)
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, KeyError):
            raise UserError(
                f'{self._folder / "best.json"} is damaged. Remove {self._folder}: the best is then chosen from the '
                'evaluations that come.'
            ) from None
        return best if there else {}

    def _note(self, best: Mapping) -> None:
        replace_text(self._folder / 'best.json', json.dumps(best) + '\n')
