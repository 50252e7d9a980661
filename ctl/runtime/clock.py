"""Where the time of a run goes, over all its starts: every second is in one of a few kinds."""

import contextlib
import json
import os
import pathlib
import time
from collections.abc import Iterator, Mapping

from ctl.files import replace_text

KINDS = ('start-up', 'restore', 'input wait', 'step', 'eval', 'save', 'lost')
_WORK = ('input wait', 'step', 'eval', 'save')
# Between two writings of an inner loop's time, at least: what a kill may leave uncounted.
WRITE_SECONDS = 5.0


class Clock:
    """Counts the seconds of each of KINDS, from the beginning of the process, after those of earlier starts.

    `lost` is what was done after the last checkpoint before a kill: it is done again. Only what is written can be known
    of a process that was killed: that is at most some seconds and an inner loop old.
    """

    def __init__(self):
        self._seconds = dict.fromkeys(KINDS, 0.0)
        self._kind, self._since = 'start-up', time.monotonic() - _age_of_process()
        self._saved: dict[str, float] | None = None
        self._path: pathlib.Path | None = None
        self._written = 0.0  # when, on the monotonic clock

    @property
    def seconds(self) -> dict[str, float]:
        """By kind, up to now."""
        now = time.monotonic()
        self._seconds[self._kind] += now - self._since
        self._since = now
        return dict(self._seconds)

    def enter(self, kind: str) -> None:
        """From now on, time is of that kind."""
        self._seconds = self.seconds
        self._kind = kind

    @contextlib.contextmanager
    def during(self, kind: str) -> Iterator[None]:
        """Time inside the `with` is of that kind."""
        before = self._kind
        self.enter(kind)
        try:
            yield
        finally:
            self.enter(before)

    def move(self, seconds: float, source: str, target: str) -> None:
        """What was counted as one kind was another."""
        seconds = min(seconds, self.seconds[source])
        self._seconds[source] -= seconds
        self._seconds[target] += seconds

    def go_on(self, path: pathlib.Path) -> None:
        """Adds the time of earlier starts, which is in a file, and writes it there from now on."""
        self._path = path
        try:
            before = json.loads(path.read_text(encoding='utf8'))
            now, saved = before['seconds'], before['at_the_last_checkpoint']
            for kind in KINDS:
                done = min(saved[kind], now[kind]) if kind in _WORK else now[kind]
                self._seconds[kind] += done
                self._seconds['lost'] += now[kind] - done
        except (OSError, ValueError, TypeError, KeyError):  # none, or cut off by a kill
            pass
        self.saved()

    def saved(self) -> None:
        """A checkpoint was written: what was done so far is not done again."""
        self._saved = self.seconds
        self._write(self._saved)

    def write_now_and_then(self) -> None:
        """Writes what is known so far, unless that was done in the last WRITE_SECONDS."""
        if time.monotonic() - self._written >= WRITE_SECONDS:
            self.write()

    def write(self) -> None:
        """Writes what is known so far."""
        self._write(self.seconds)

    def _write(self, seconds: Mapping[str, float]) -> None:
        if self._path:
            times = {'seconds': seconds, 'at_the_last_checkpoint': self._saved}
            replace_text(self._path, json.dumps(times) + '\n')
            self._written = time.monotonic()


def as_text(seconds: Mapping[str, float]) -> str:
    """One line: the whole, the share of each kind, and how much of it was useful."""
    whole = sum(seconds.values())
    shares = ', '.join(f'{kind} {value / whole:.0%}' for kind, value in seconds.items())
    return f'{whole:,.0f} s: {shares}; {seconds["step"] / whole:.0%} of it was training'


def _age_of_process() -> float:
    """Seconds since this process began, where the system tells; else 0."""
    try:
        with open('/proc/self/stat') as stat, open('/proc/uptime') as uptime:
            began = int(stat.read().rpartition(')')[2].split()[19]) / os.sysconf('SC_CLK_TCK')
            return float(uptime.read().split()[0]) - began
    except (OSError, ValueError, IndexError):
        return 0.0
