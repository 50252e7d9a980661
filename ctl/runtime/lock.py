"""One owner for a workdir: two runs in one would write over each other."""

import contextlib
import datetime
import fcntl
import io
import json
import os
import pathlib
import socket
from collections.abc import Callable, Iterator

from ctl.errors import UserError


@contextlib.contextmanager
def owned(workdir: pathlib.Path, say: Callable[[str], None], break_lock: bool = False) -> Iterator[None]:
    """Holds `workdir` for this process: the file `lock` in it says who does, since when, and is removed at the end.

    The operating system's lock on that file ends with the process, however it ends: what a dead process on this host
    left is taken over. Of a process on another host nobody here can tell whether it lives.

    Args:
      workdir: made where it is not there, and removed when nothing was put into it.
      say: is told when the lock of another is taken over.
      break_lock: whether to take over that of another host.

    Raises:
      UserError: when another process has it; names host, process and start.
    """
    path = workdir / 'lock'
    with _open_locked(path) as file:
        owner = _read(file)
        if owner and owner['host'] != socket.gethostname() and not break_lock:
            raise UserError(
                f'--workdir={workdir} is in use by {_name(owner)}, another machine. If that run is dead, take over '
                'with --break_lock.'
            )
        if owner:
            say(f'Taking over the workdir from {_name(owner)}, which did not end as it should.')
        now = datetime.datetime.now().isoformat(sep=' ', timespec='seconds')
        file.truncate(0)
        file.write(json.dumps({'host': socket.gethostname(), 'process': os.getpid(), 'started': now}) + '\n')
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                workdir.rmdir()  # only when it is empty


def _open_locked(path: pathlib.Path) -> io.TextIOWrapper:
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(path, 'a+', encoding='utf8')  # noqa: SIM115 (it is held open)
        except OSError as error:
            raise UserError(f'--workdir={path.parent}: cannot be written: {error.strerror}.') from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _read(file)
            file.close()
            raise UserError(
                f'--workdir={path.parent} is in use by {_name(owner)}. Choose another, or end that run.'
            ) from None
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(file.fileno()).st_ino:
                return file
        file.close()  # its owner removed it in this moment


def _read(file: io.TextIOWrapper) -> dict | None:
    file.seek(0)
    try:
        owner = json.loads(file.read())
        return {key: owner[key] for key in ('host', 'process', 'started')}
    except (ValueError, TypeError, KeyError):  # empty, or cut off by a kill
        return None


def _name(owner: dict | None) -> str:
    if owner is None:
        return 'another process'
    return f'process {owner["process"]} on {owner["host"]}, started {owner["started"]}'
