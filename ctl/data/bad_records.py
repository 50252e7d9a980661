"""What happens to records that cannot be trained on: the run stops, or goes on without them and says so."""

import json
import pathlib
import threading
from collections.abc import Callable

import ml_collections

from ctl.data.index import Index
from ctl.errors import GuardError, UserError

# Lines said one by one; of more, only the number.
MOST_LINES = 20


class BadRecords:
    """Every bad record that was met, once: those that an index found damaged, and those that turn out to be wrong.

    A damaged record is not in the index. A sound one that is wrong for the experiment keeps its place in its batch,
    with weight 0, so that the order of all others, and every shape, stays what it was.

    Attributes:
      skip: whether the run goes on without them.
      damaged: how many cannot be read.
      wrong: how many have been met that are wrong.
      say: is given a line for each of the first bad records, and for what is odd.
    """

    def __init__(self, settings: ml_collections.ConfigDict, say: Callable[[str], None]):
        """`settings` is the `data` section."""
        self.skip, self._most, self.say = settings.on_bad_record == 'skip', settings.max_bad_records, say
        self.damaged = self.wrong = 0
        self._found: dict[tuple[str, int], str] = {}
        self._path: pathlib.Path | None = None
        self._lock = threading.Lock()  # the input pipeline works in several threads

    def take_damaged(self, index: Index) -> None:
        """Takes note of what an index found damaged.

        Raises:
          UserError: when bad records stop the run, naming the first.
          GuardError: when there are more than allowed.
        """
        damaged = index.damaged
        if damaged and not self.skip:
            path, first = damaged[0]
            more = f' ({len(damaged)} records are damaged, in {len({path for path, _ in damaged})} files)'
            raise UserError(
                f'{path}: record {first.number} {first.problem}{more if len(damaged) > 1 else ""}. Write the file '
                'again, or leave such records out: --config.data.on_bad_record=skip.'
            )
        for path, each in damaged:
            if self._add(path, each.number, each.problem, 'left out'):
                self.damaged += 1
        self.check()

    def take_wrong(self, index: Index, record: int, problem: str) -> None:
        """Takes note of a sound record that is wrong; raises GuardError when there are more than allowed."""
        file, number = index.locate(record)
        problem = problem.removeprefix(index.name(record)).lstrip(': ')
        if self._add(index.files[file], int(number), problem, 'has weight 0'):
            self.wrong += 1
        self.check()

    def _add(self, path: str, number: int, problem: str, fate: str) -> bool:
        """Whether the record was not known yet; says and writes down one that was not."""
        with self._lock:
            if (path, number) in self._found:
                return False
            self._found[path, number] = problem
            if len(self._found) <= MOST_LINES:
                self.say(f'bad record: {path}: record {number} {problem.rstrip(".")}; {fate}.')
            if self._path:
                self._write([(path, number)])
            return True

    def list_in(self, path: pathlib.Path) -> None:
        """From now on writes every bad record to a file, a JSON object a line, after those that are in it already.

        Those met before a restart count, but are not said again.
        """
        with self._lock:
            self._path, new = path, list(self._found)
            for line in path.read_text(encoding='utf8').splitlines() if path.exists() else ():
                try:
                    known = json.loads(line)
                    place = known['file'], known['record']
                except (ValueError, TypeError, KeyError):  # cut off by a kill
                    continue
                if place in self._found:
                    new.remove(place)
                else:
                    self._found[place] = known['problem']
                    self.wrong += 1
            self._write(new)

    def _write(self, places: list[tuple[str, int]]) -> None:
        lines = [
            json.dumps({'file': path, 'record': number, 'problem': self._found[path, number]})
            for path, number in places
        ]
        if lines:
            with open(self._path, 'a', encoding='utf8') as stream:
                stream.write(''.join(f'{line}\n' for line in lines))

    def check(self) -> None:
        """Raises GuardError when there are more bad records than allowed."""
        if self.skip and len(self._found) > self._most:
            (path, number), problem = next(reversed(self._found.items()))
            listed = f'; all are in {self._path}' if self._path else ''
            raise GuardError(
                f'{len(self._found)} bad records are more than data.max_bad_records={self._most}. The last: {path}: '
                f'record {number} {problem.rstrip(".")}{listed}.'
            )

    def __str__(self) -> str:
        listed = f' ({self._path})' if self._path and self._found else ''
        return f'{self.damaged} damaged and left out, {self.wrong} wrong and of weight 0{listed}'
