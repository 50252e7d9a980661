"""The files a run leaves that other programs read: run.json, config.json and metrics.jsonl."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable

from ctl.errors import UserError
from ctl.files import replace_text, sync


def read_config(workdir: pathlib.Path) -> dict | None:
    """`config.json` as nested dicts; None where there is none.

    Raises:
      UserError: when it is not JSON.
    """
    return _read_json(workdir / 'config.json')


def has_begun(workdir: pathlib.Path) -> bool:
    """Whether a run has trained there. One that failed before its first step may begin again with other settings.

    Raises:
      UserError: when its settings are lost.
    """
    if any((workdir / 'checkpoints').rglob('ckpt-*')):
        if not (workdir / 'config.json').exists():
            raise UserError(
                f'--workdir={workdir}: has checkpoints and no config.json, so that nothing says how they were made. '
                'Restore it; or choose another --workdir, with the weights as train.init_checkpoint.'
            )
        return True
    metrics = workdir / 'metrics.jsonl'
    if not metrics.exists():
        return False
    with open(metrics, encoding='utf8', errors='replace') as lines:
        return any(_step(line) > 0 for line in lines)


# 1: `lamb` is the paper's. 2: seeds have 64 bits, eval.steps takes a sample, float32 is float32 on GPUs too.
ARITHMETIC = 2


@dataclasses.dataclass(frozen=True)
class Note:
    """What `run.json` notes of a run, besides its config.

    Attributes:
      experiment: a name, or the absolute path of a file.
      own_data: whether the experiment made its data itself.
      arithmetic: which one its steps are made by; counts up where a later version of `ctl` makes other steps.
    """

    experiment: str
    own_data: bool = False
    arithmetic: int = ARITHMETIC


def read_note(workdir: pathlib.Path) -> Note | None:
    """`run.json`; None where there is none, as in workdirs of older versions."""
    note = _read_json(workdir / 'run.json')
    return note and Note(note['experiment'], note.get('own_data', False), note.get('arithmetic', 1))


def _read_json(path: pathlib.Path) -> dict | None:
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding='utf8'))
    except ValueError as error:
        raise UserError(f'{path} is not JSON ({error}): restore it, or choose another --workdir.') from None
    if not isinstance(found, dict):
        raise UserError(f'{path} holds no JSON object: restore it, or choose another --workdir.')
    return found


def write_config(workdir: pathlib.Path, text: str) -> None:
    """Writes `config.json`, whole or not at all."""
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        replace_text(workdir / 'config.json', text)
    except OSError as error:
        raise UserError(f'--workdir={workdir}: cannot be written: {error.strerror}.') from None


def write_note(workdir: pathlib.Path, note: Note) -> None:
    """Writes `run.json`, whole or not at all."""
    replace_text(workdir / 'run.json', json.dumps(dataclasses.asdict(note)) + '\n')


class MetricsFile:
    """`metrics.jsonl`: one JSON object a line, in the order of steps, no step twice."""

    def __init__(self, workdir: pathlib.Path, writes: bool = True, check: Callable[[], None] = lambda: None):
        """`writes`: whether this worker is the one that writes it; all read it. `check`, called before, may raise."""
        self._writes, self._check, self._path = writes, check, workdir / 'metrics.jsonl'

    def _lines(self) -> list[str]:
        return self._path.read_text(encoding='utf8').splitlines() if self._path.exists() else []

    def has(self, step: int, kind: str) -> bool:
        """Whether there is a line of that step and kind."""
        return any(line['step'] == step for line in self.read(kind))

    def read(self, kind: str) -> list[dict]:
        """The lines of a kind, in order."""
        lines = [json.loads(line) for line in self._lines() if _step(line) < math.inf]
        return [line for line in lines if line['kind'] == kind]

    def last_step(self) -> int:
        """The last step that there is a line of; 0 for none."""
        return max((int(_step(line)) for line in self._lines() if _step(line) < math.inf), default=0)

    def drop_after(self, step: int) -> None:
        """Drops what a killed run wrote after `step`, its last checkpoint: those steps come again."""
        if self._writes and self._path.exists():
            self._check()
            replace_text(self._path, ''.join(f'{line}\n' for line in self._lines() if _step(line) <= step))

    def append(self, **values) -> None:
        """Adds a line; numbers in full precision, and null for what is not finite."""
        if not self._writes:
            return
        self._check()
        values = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        with open(self._path, 'a', encoding='utf8') as stream:
            stream.write(json.dumps(values) + '\n')

    def sync(self) -> None:
        """Waits until the lines are on the disk."""
        if self._writes and self._path.exists():
            sync(self._path)


def _step(line: str) -> float:
    try:
        return json.loads(line)['step']
    except (ValueError, TypeError, KeyError):  # cut off by a kill
        return float('inf')
