"""Standard output and standard error that a program outlives: `| head`, a `tee` that died, a terminal that closed."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import TextIO


class _Lasting:
    """A text stream whose reader may go, or whose disk may be full: what follows is lost, and nothing else."""

    def __init__(self, stream: TextIO, name: str, aside: TextIO | None):
        """`name` as a person knows it; `aside` is where its end is said."""
        self._stream, self._name, self._aside = stream, name, aside

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        # In its place, for the stream may hold what it could not write, and tries again when Python ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        if self._aside:
            print(
                f'{self._name} cannot be written ({error.strerror}): the run goes on without it.',
                file=self._aside,
                flush=True,
            )


def open_missing() -> None:
    """Puts the null device where a program was started without a standard stream, as by `>&-`.

    The next file that it opens would get the stream's number, and with it whatever TensorFlow prints.
    """
    for number, name in enumerate(('stdin', 'stdout', 'stderr')):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, 'w' if number else 'r', closefd=False))


def print_anything() -> None:
    """Lets the standard streams take what their encoding has not: a path may be in none."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, 'reconfigure'):
            stream.reconfigure(errors='backslashreplace')


@contextlib.contextmanager
def tidily_ended() -> Iterator[None]:
    """Inside the `with`, signals that would end the process at once let it remove what is half made."""

    def end(number: int, frame: object) -> None:
        sys.exit(128 + number)

    numbers = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        numbers = []
    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def lasting() -> Iterator[None]:
    """Inside the `with`, nothing fails because standard output or standard error is gone."""
    before = sys.stdout, sys.stderr
    for stream in before:
        with contextlib.suppress(OSError, ValueError):  # what a terminal shares with Node.js, say, refuses when full
            os.set_blocking(stream.fileno(), True)
    sys.stderr = _Lasting(before[1], 'standard error', None)
    sys.stdout = _Lasting(before[0], 'standard output', sys.stderr)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, _Lasting):
                stream.flush()
        sys.stdout, sys.stderr = before
