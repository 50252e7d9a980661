"""One owner for a workdir: two runs in one would write over each other.

The file `lock` in it says who has it, and is removed at the end. On one machine the operating system's lock on that
file tells whether its owner lives. Between machines it is a lease: the owner counts up in it every ten seconds, and a
run that wants the workdir takes it over when the count has stood still for 90, by its own clock; those of machines are
never compared.
"""

import contextlib
import dataclasses
import datetime
import errno
import fcntl
import io
import json
import os
import pathlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator

from ctl.errors import UserError, WorkdirGone, WorkdirLost

# TensorFlow can keep Python from running for a while, so a beat may be late; over a network it may be seen late, too.
BEAT_SECONDS, STALE_SECONDS, LOOK_SECONDS = 10.0, 90.0, 1.0
# How long a file may take to be seen by another machine.
SEEN_SECONDS = 60.0
# What flock says on a file system that has none: some NFS, some Lustre.
NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_WIDTH = 400
# A folder that comes and goes is tried so often.
OPEN_TRIES = 100
TOKEN_BYTES = 7  # as a number, it is an int64


def boot_id() -> str:
    """Of this machine since it was started: the same in all of its containers, and what no name is."""
    try:
        return pathlib.Path('/proc/sys/kernel/random/boot_id').read_text().strip()
    except OSError:
        return socket.gethostname()


@dataclasses.dataclass(frozen=True)
class Owner:
    """Who has a workdir, as the file says.

    Attributes:
      host, process, started: for people.
      boot: `boot_id` of the machine; '' in a file of an older version.
      token: of this one start; where the file cannot be understood, its text.
      beat: counts up while the owner lives.
    """

    host: str
    process: int
    started: str
    boot: str = ''
    token: str = ''
    beat: int = 0

    def __str__(self) -> str:
        return f'process {self.process} on {self.host}, started {self.started}' if self.host else 'another process'

    @property
    def here(self) -> bool:
        """Whether it is, or was, a process of this machine."""
        return self.boot == boot_id() if self.boot else self.host == socket.gethostname()

    @property
    def elsewhere(self) -> str:
        return ', another machine' if self.host and not self.here else ''


def _read(path: pathlib.Path) -> Owner | None:
    """Opened anew, for NFS may go on showing what an open file was; None where nobody has it."""
    try:
        text = path.read_text(encoding='utf8', errors='replace').strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno != errno.ESTALE:  # NFS, of a file that another machine has removed since it was opened
            raise
        return None
    try:
        found = json.loads(text)
        return Owner(**{field.name: found[field.name] for field in dataclasses.fields(Owner) if field.name in found})
    except (ValueError, TypeError):  # cut off by a kill, or half seen
        return Owner('', 0, '', token=text) if text else None


def _write(path: pathlib.Path, owner: Owner) -> None:
    """In place, over the whole of the line before, and closed: then NFS shows it to others."""
    with open(path, 'r+', encoding='utf8') as file:
        file.write(f'{json.dumps(dataclasses.asdict(owner)):<{_WIDTH}}\n')
        file.truncate()


class Lease:
    """A workdir that this process has, and says so."""

    def __init__(self, path: pathlib.Path, owner: Owner):
        self._path, self._owner = path, owner
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat, name='lock', daemon=True)
        self._beating.start()

    def check(self) -> None:
        """To be called before something is written to the workdir; raises WorkdirLost when another run has it now."""
        now = _read(self._path)
        if now is None and not self._path.exists():
            raise WorkdirGone(
                f'--workdir={self._path.parent}: {self._path.name} in it is gone, so the folder was moved, removed or '
                'tidied up. Nothing more was written; start again with --workdir as it is now'
            )
        if now is None or (now.host and now.token != self._owner.token):
            raise WorkdirLost(
                f'--workdir={self._path.parent} is not ours any more: {now or "another run"} has taken it over after '
                'this one had given no sign of life, and nothing more was written'
            )

    @property
    def token(self) -> str:
        """Hexadecimal digits that are in the file while this process has the workdir, and in no other."""
        return self._owner.token

    def _beat(self) -> None:
        beat = 0
        while not self._ended.wait(BEAT_SECONDS):
            beat += 1
            with contextlib.suppress(OSError):
                if self._is_ours():
                    _write(self._path, dataclasses.replace(self._owner, beat=beat))

    def _is_ours(self) -> bool:
        now = _read(self._path)
        return now is not None and now.token == self._owner.token

    def end(self) -> None:
        """Gives the workdir back."""
        self._ended.set()
        self._beating.join()
        if self._is_ours():
            self._path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self._path.parent.rmdir()  # only when it is empty


@contextlib.contextmanager
def owned(
    workdir: pathlib.Path,
    say: Callable[[str], None],
    break_lock: bool = False,
    patience: float = 0.0,
    check: Callable[[], None] = lambda: None,
) -> Iterator[Lease]:
    """Holds `workdir` for this process inside the `with`.

    What a dead process of this machine left is taken over at once, what one of another machine left when it has given
    no sign of life for 90 s.

    Args:
      workdir: made where it is not there, and removed when nothing was put into it.
      say: is told whom this one waits for, and when the lock of another is taken over.
      break_lock: whether to take over that of another machine as soon as it misses a beat or two.
      patience: seconds to wait for a run of another machine that lives.
      check: is called while waiting, and may raise.

    Raises:
      UserError: when another process has it; names host, process and start.
    """
    waiting = _Waiting(workdir / 'lock', say, 2 * BEAT_SECONDS if break_lock else STALE_SECONDS, patience)
    while (taken := waiting.take()) is None:
        check()
        time.sleep(LOOK_SECONDS)
    file, owner = taken
    with file:  # held open: the operating system's lock ends with it
        lease = Lease(workdir / 'lock', owner)
        try:
            yield lease
        finally:
            lease.end()


def sees(workdir: pathlib.Path, token: str) -> bool:
    """Whether this machine sees that the owner of that token has the workdir, at once or soon."""
    end = time.monotonic() + SEEN_SECONDS
    while (owner := _read(workdir / 'lock')) is None or owner.token != token:
        if time.monotonic() > end:
            return False
        time.sleep(LOOK_SECONDS)
    return True


class _Waiting:
    """Looks, again and again, whether a workdir can be had."""

    def __init__(self, path: pathlib.Path, say: Callable[[str], None], stale_seconds: float, patience: float):
        self._path, self._say, self._stale_seconds = path, say, stale_seconds
        self._end = time.monotonic() + patience
        self._seen: Owner | None = None
        self._dead: Owner | None = None  # set aside
        self._since = 0.0
        self._alive = False  # a sign of life was seen
        self._flock = True  # the file system has it

    def take(self) -> tuple[io.TextIOWrapper, Owner] | None:
        """The open file and its new owner, this process; None where another has it still."""
        file = self._open()
        try:
            locked = self._lock(file)
            other = _read(self._path)
            if self._is_free(other, locked) and locked and self._is_there(file):
                owner = self._write_ours()
                if owner:
                    if gone := other or self._dead:
                        self._say(f'Taking over the workdir from {gone}, which did not end as it should.')
                    return file, owner
        except BaseException:
            file.close()
            raise
        file.close()
        return None

    def _open(self) -> io.TextIOWrapper:
        for tries_left in reversed(range(OPEN_TRIES)):
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                return open(self._path, 'a+', encoding='utf8')
            except OSError as error:
                # Whoever had it may have removed the empty folder just now, between two of these lines.
                if not (tries_left and isinstance(error, FileExistsError | FileNotFoundError)):
                    raise UserError(f'--workdir={self._path.parent}: cannot be written: {error.strerror}.') from None
        raise AssertionError

    def _lock(self, file: io.TextIOWrapper) -> bool:
        """Whether the operating system's lock is ours now, or there is none."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in NO_FLOCK:
                raise
            if self._flock:
                self._say(
                    f'{self._path.parent} is on a file system without locks ({error.strerror}): after a kill, the next '
                    f'start waits {STALE_SECONDS:g} s for a sign of life.'
                )
            self._flock = False
        return True

    def _is_free(self, other: Owner | None, locked: bool) -> bool:
        """Whether the owner of the file, if any, is gone; raises UserError where it is not and waiting has no sense."""
        if other is None:
            return True
        if other.here and self._flock:
            if not locked:
                raise UserError(f'--workdir={self._path.parent} is in use by {other}. Choose another, or end that run.')
            return True
        now, stale_seconds = time.monotonic(), self._stale_seconds if other.host else 2 * BEAT_SECONDS
        if other != self._seen:
            if self._seen is not None:
                self._alive = True  # whatever beat it began with may be the last of one that is dead
            else:
                self._say(
                    f'{self._path.parent} is in use by {other}{other.elsewhere}: waiting for its end, or until it has '
                    f'given no sign of life for {stale_seconds:g} s.'
                )
            self._seen, self._since = other, now
        if now - self._since >= stale_seconds:
            if not locked:  # as a machine that is cut off, or a process that stands still, may hold it for ever
                _set_aside(self._path, other)
                self._dead = other
            return True
        if now > self._end and self._alive and other.host:
            raise UserError(
                f'--workdir={self._path.parent} is in use by {other}{other.elsewhere}, and that run is alive. Choose '
                'another, or end that run.'
            )
        return False

    def _is_there(self, file: io.TextIOWrapper) -> bool:
        """Whether the open file is the one at the path: its owner may have removed it in this moment."""
        try:
            return os.stat(self._path).st_ino == os.fstat(file.fileno()).st_ino
        except FileNotFoundError:
            return False

    def _write_ours(self) -> Owner | None:
        """Writes who we are; None when another machine did the same, and later."""
        now = datetime.datetime.now().isoformat(sep=' ', timespec='seconds')
        owner = Owner(socket.gethostname(), os.getpid(), now, boot_id(), secrets.token_hex(TOKEN_BYTES))
        _write(self._path, owner)
        if self._seen:  # so others may have waited for it, too
            time.sleep(2 * LOOK_SECONDS)
        found = _read(self._path)
        return owner if found and found.token == owner.token else None


def _set_aside(path: pathlib.Path, dead: Owner) -> None:
    """Makes way for a new file; puts back what another that waited has made in the meantime."""
    aside = path.with_name(f'lock-{secrets.token_hex(8)}')
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, aside)
        if _read(aside) != dead:
            try:
                os.link(aside, path)
            except FileExistsError:
                pass
            except OSError:  # no hard links there
                os.rename(aside, path)
                return
        aside.unlink()
