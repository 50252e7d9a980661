"""A step that does not end: noticed, described, and ended, so that the run can go on.

A stalled all-reduce or a hanging file system does not fail: it waits for ever. A thread watches the inner loops. Should
the stalled call keep Python locked, no thread of Python runs; then the operating system's own timer ends the process.
"""

import contextlib
import ctypes
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator

import tensorflow as tf

from ctl.errors import Interrupted

# The first inner loop traces the step, which takes longer than any other, and nobody knows how long.
FIRST_SECONDS, FIRST_TIMES = 60.0, 10
# How much later the timer of the operating system comes than the thread.
LOCKED_SECONDS = 15.0
_STDERR = 2  # whatever Python has put in its place


class Watch:
    """Watches inner loops, one after the other.

    Attributes:
      awaits_input: bool variable; a step sets it around its asking for a batch.
    """

    def __init__(self, step: tf.Variable, seconds: float, advice: str, remedy: str):
        """Outside of a strategy's scope: what is read when devices have stalled must not be on one.

        Args:
          step: counts the steps that are done, on the host.
          seconds: that a loop may take beyond what its steps took before; 0 watches nothing.
          advice: how to go on.
          remedy: what to try where the devices are waited for.
        """
        self._step, self._seconds, self._advice, self._remedy = step, seconds, advice, remedy
        with tf.device('/cpu:0'):
            self.awaits_input = tf.Variable(False, trainable=False, name='awaits_input')
        self._changed = threading.Condition()
        self._ended = False
        self._deadline: float | None = None  # of the loop that is going on
        self._allowed = 0.0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inner loops inside the `with` are watched."""
        if not self._seconds:
            yield
            return
        thread = threading.Thread(target=self._watch, name='stall', daemon=True)
        thread.start()
        try:
            yield
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify()
            thread.join()

    @contextlib.contextmanager
    def loop(self, steps: int, seconds_per_step: float | None) -> Iterator[None]:
        """An inner loop of so many steps, which took so long each before; None where none was taken."""
        if not self._seconds:
            yield
            return
        usual = steps * seconds_per_step if seconds_per_step else FIRST_SECONDS + (FIRST_TIMES - 1) * self._seconds
        self._allowed = usual + self._seconds
        self._expect(time.monotonic() + self._allowed)
        with ends_without_python(self._allowed + LOCKED_SECONDS):
            try:
                yield
            finally:
                self._expect(None)

    def _expect(self, deadline: float | None) -> None:
        with self._changed:
            self._deadline = deadline
            self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while not self._ended:
                left = None if self._deadline is None else self._deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
            else:
                return
        self._end()

    def _end(self) -> None:
        waits, remedy = 'its devices', self._remedy
        if self.awaits_input.numpy():
            waits, remedy = 'its input', 'look at the disk or network of data.train'
        print(
            f'stalled: step {self._step.numpy()} waits for {waits}, devices.stall_seconds={self._seconds:g} longer '
            f'than the steps before took: {remedy}. {self._advice}\nWhat every thread of Python is doing:',
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback(_STDERR, all_threads=True)
        os._exit(Interrupted.exit_code)


class _Event(ctypes.Structure):
    """`struct sigevent` of Linux, 64 bytes: a function is called with a value, in a thread of its own."""

    _fields_ = [
        ('value', ctypes.c_void_p),
        ('number', ctypes.c_int),
        ('notify', ctypes.c_int),
        ('function', ctypes.c_void_p),
        ('attributes', ctypes.c_void_p),
        ('rest', ctypes.c_char * 32),
    ]


class _Times(ctypes.Structure):
    """`struct itimerspec`: how long between calls, and until the first; seconds and nanoseconds."""

    _fields_ = [(name, ctypes.c_long) for name in ('again_s', 'again_ns', 'first_s', 'first_ns')]


_CLOCK_MONOTONIC, _SIGEV_THREAD = 1, 2


def _timers() -> ctypes.CDLL | None:
    """The library with timer_create: the C library since glibc 2.34, librt before; None where neither has it."""
    for name in (None, 'librt.so.1'):
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(name)
            if hasattr(library, 'timer_create'):
                return library
    return None


@contextlib.contextmanager
def ends_without_python(seconds: float) -> Iterator[None]:
    """After so many seconds inside the `with` the stacks are printed and the process ends, even if Python is locked."""
    libc, timers = ctypes.CDLL(None), _timers()
    exit_now = ctypes.cast(libc._exit, ctypes.c_void_p).value
    event = _Event(Interrupted.exit_code, 0, _SIGEV_THREAD, exit_now, None)
    timer = ctypes.c_void_p()
    if timers is None or timers.timer_create(_CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)):
        yield  # the thread is left
        return
    faulthandler.dump_traceback_later(seconds, file=_STDERR)
    timers.timer_settime(timer, 0, ctypes.byref(_Times(0, 0, int(seconds) + 2, 0)), None)
    try:
        yield
    finally:
        timers.timer_delete(timer)
        faulthandler.cancel_dump_traceback_later()
