"""Signals: the first asks a run to save and end, the second ends it at once.

SIGTERM and SIGINT; SIGHUP, which a terminal that closes sends; SIGUSR1 and SIGUSR2, by which Slurm (where --signal says
so), LSF, Grid Engine and what submits jobs to them tell a job that its time is nearly over.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator

from ctl.errors import Interrupted

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# Signals that follow the first within so many seconds are the same wish: `timeout` tells a whole group of processes,
# and `uv run`, which is one of them, tells us again.
SAME_SECONDS = 1.0


def heard() -> list[signal.Signals]:
    """Those that end a run: what was ignored when the process started, as by nohup, stays ignored."""
    return [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]


@contextlib.contextmanager
def ending_at_once(how_to_go_on: str) -> Iterator[None]:
    """Inside the `with`, where nothing is to be saved, a signal raises Interrupted as soon as Python runs."""

    def end(number: int, frame: object) -> None:
        raise Interrupted(f'{signal.Signals(number).name} received: nothing was trained yet. {how_to_go_on}')

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, end) for number in heard()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Stop:
    """Whether a signal has asked the run to end.

    Attributes:
      received: the name of the signal that did; None for none so far.
    """

    def __init__(self):
        self.received: str | None = None
        self._since = 0.0

    @property
    def asked(self) -> bool:
        """Whether the run is to end."""
        return self.received is not None

    def check(self) -> None:
        """Raises Interrupted when the run is to end."""
        if self.asked:
            raise Interrupted(f'{self.received} received')

    @contextlib.contextmanager
    def watching(self) -> Iterator['Stop']:
        """Takes note of signals inside the `with`. In the main thread; elsewhere it does nothing.

        Python's own handlers wait until TensorFlow returns from a loop of many steps. A byte for each signal goes down
        a socket at once, and a thread reads it: so a second signal ends the process, whatever it is doing.
        """
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        before = {number: signal.signal(number, lambda *_: None) for number in heard()}
        threading.Thread(target=self._listen, args=[ours], name='signals', daemon=True).start()
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wakeup)
            theirs.close()  # ends the thread

    def _listen(self, ours: socket.socket) -> None:
        with ours:
            while byte := ours.recv(1):
                number = byte[0]
                if number not in _ENDING:
                    continue
                name = signal.Signals(number).name
                if not self.asked:
                    self._since, self.received = time.monotonic(), name
                elif time.monotonic() - self._since > SAME_SECONDS:
                    print(f'{name} received after {self.received}: ended at once.', file=sys.stderr, flush=True)
                    os._exit(128 + number)
