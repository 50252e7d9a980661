"""Starts several workers on this machine, and starts all again when one is lost.

    python -m tools.launch --workers=2 [--restarts=3] -- --experiment=bert_mlm [--config.KEY=VALUE ...]

What stands after -- is for ctl.train. It does here what a cluster does elsewhere: give every worker its TF_CONFIG,
share out the GPUs, prefix what it prints, pass signals on, and restart. Ends with the exit code of the run.
"""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from absl import flags

from ctl.command_line import Program, Request
from ctl.errors import GuardError, Interrupted, UserError
from ctl.flags import COMMAND_VARIABLE
from ctl.runtime import signals
from ctl.settings import BASE

# How long the others have to end by themselves when one has ended with an error that would come again.
PATIENCE_SECONDS = 60.0
_NVIDIA = pathlib.Path('/proc/driver/nvidia/gpus')
# Exit codes that would only come again; 1 is a traceback.
_FINAL = (1, UserError.exit_code, GuardError.exit_code)


def _define(values: flags.FlagValues) -> None:
    flags.DEFINE_integer('workers', 2, 'processes', lower_bound=1, flag_values=values)
    flags.DEFINE_integer('restarts', 0, 'times that all are started again', lower_bound=0, flag_values=values)


PROGRAM = Program(
    'tools.launch', __doc__, _define, words='-- FLAGS_OF_CTL_TRAIN', least=1, most=None, outlives_output=True
)


def main(argv: list[str]) -> int:
    """Runs one command line, without the program's name, and returns the exit code."""
    return PROGRAM.run(argv, launch)


def launch(request: Request) -> int:
    """Does what is asked for, and returns the exit code of the run."""
    launcher = _Launcher(request.own['workers'], request.words, request.command)
    before = {number: signal.signal(number, launcher.pass_on) for number in signals.heard()}
    try:
        for left in range(request.own['restarts'], -1, -1):
            code = launcher.run()
            if code == 0 or code in _FINAL or launcher.signalled or not left:
                return code
            print(f'launch: a worker ended with {code}; starting all again, {left} times at most.', flush=True)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code


class _Launcher:
    """The processes of one run, and the signals for them."""

    def __init__(self, workers: int, words: Sequence[str], command: str):
        """`words` for ctl.train; `command` is what the person typed, for the message on how to go on."""
        self._count, self._words, self._command = workers, words, command
        self._gpus = share_gpus(os.environ, workers)
        self._stall_seconds = _stall_seconds(words)
        self._processes: list[subprocess.Popen] = []
        self._killed: set[int] = set()  # by us
        self.signalled = False

    def pass_on(self, number: int, frame) -> None:
        self.signalled = True
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def run(self) -> int:
        """Starts all, waits for all; 0, or the exit code that says most of what went wrong."""
        cluster = {'worker': free_addresses(self._count)}
        self._processes, self._killed = [], set()
        try:
            for index in range(self._count):
                if not self.signalled:
                    self._processes.append(self._start(cluster, index))
        except OSError as error:
            self._kill_all()
            raise UserError(f'--workers={self._count}: worker {index} cannot be started: {error.strerror}.') from None
        if self.signalled:  # of those that came in between, not all have heard
            self.pass_on(signal.SIGTERM, None)
        printers = [threading.Thread(target=_print_lines, args=[i, p]) for i, p in enumerate(self._processes)]
        for printer in printers:
            printer.start()
        try:
            codes = self._wait()
        finally:
            self._kill_all()
            for printer in printers:
                printer.join()
        for index, code in enumerate(codes):
            if code < 0 and index not in self._killed:
                why = ', as the system does when memory runs out' if code == -signal.SIGKILL else ''
                print(
                    f'launch: worker {index} was ended by {signal.strsignal(-code)} (signal {-code}){why}.', flush=True
                )
        failed = [code if code > 0 else 128 - code for code in codes if code]  # of a signal, as shells have it
        failed += [Interrupted.exit_code] if len(codes) < self._count else []  # a signal came before they were started
        said = [code for code in failed if code in (*_FINAL, Interrupted.exit_code)]
        return (sorted(said) + failed + [0])[0]

    def _start(self, cluster: dict, index: int) -> subprocess.Popen:
        config = {'cluster': cluster, 'task': {'type': 'worker', 'index': index}}
        return subprocess.Popen(
            [sys.executable, '-m', 'ctl.train', '--config.devices.strategy=multi_worker', *self._words],
            env={**os.environ, **self._gpus[index], 'TF_CONFIG': json.dumps(config), COMMAND_VARIABLE: self._command},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding='utf8',
            errors='backslashreplace',
            start_new_session=True,  # a Ctrl-C at the terminal comes to us alone, and is passed on once
        )

    def _wait(self) -> list[int]:
        """Exit codes of all, killed where they do not end after another has failed."""
        failed_since = None
        while any(process.poll() is None for process in self._processes):
            codes = [process.poll() for process in self._processes]
            if failed_since is None and any(codes):
                failed_since = time.monotonic()
            patience = self._patience(codes)
            if failed_since and patience and time.monotonic() > failed_since + patience:
                self._killed = {index for index, process in enumerate(self._processes) if process.poll() is None}
                self._kill_all()
            time.sleep(0.05)
        return [process.wait() for process in self._processes]

    def _kill_all(self) -> None:
        """Each with what it has started, which may hold the pipe that we read."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _patience(self, codes: Sequence[int | None]) -> float:
        """Seconds that the others have when some have ended so; 0 for as long as they like."""
        if any(code in _FINAL for code in codes):
            return PATIENCE_SECONDS
        # After a signal, as at the end, they wait for the chief, which saves for all. Who has lost a worker notices
        # that by itself, or is stalled.
        return 0.0 if self.signalled else self._stall_seconds


def share_gpus(environment: Mapping[str, str], workers: int) -> list[dict[str, str]]:
    """What each worker's environment says of GPUs: as many as any other's, or nothing where there are none.

    Raises:
      UserError: when they do not share evenly.
    """
    visible = environment.get('CUDA_VISIBLE_DEVICES')
    gpus = [str(i) for i in range(len(list(_NVIDIA.glob('*'))))]
    if visible is not None:
        gpus = [gpu for gpu in visible.replace(' ', '').split(',') if gpu not in ('', '-1')]
    if not gpus:
        return [{}] * workers
    if len(gpus) % workers:
        fitting = ' or '.join(str(n) for n in range(1, len(gpus) + 1) if len(gpus) % n == 0)
        raise UserError(
            f'--workers={workers}: {len(gpus)} GPUs do not share evenly: take {fitting}, or CUDA_VISIBLE_DEVICES= for '
            'workers without GPUs.'
        )
    each = len(gpus) // workers
    return [{'CUDA_VISIBLE_DEVICES': ','.join(gpus[i * each : (i + 1) * each])} for i in range(workers)]


def _stall_seconds(words: Sequence[str]) -> float:
    """devices.stall_seconds of the run, as the words for ctl.train have it, or its default."""
    values = flags.FlagValues()
    flags.DEFINE_float('config.devices.stall_seconds', BASE['devices']['stall_seconds'].default, '', flag_values=values)
    try:
        values(['launch', *words], known_only=True)
    except flags.Error as error:
        raise UserError(' '.join(str(error).split())) from None
    return values['config.devices.stall_seconds'].value


def free_addresses(count: int) -> list[str]:
    """127.0.0.1:port of ports that are free now."""
    sockets = [socket.create_server(('127.0.0.1', 0)) for _ in range(count)]
    addresses = [f'127.0.0.1:{each.getsockname()[1]}' for each in sockets]
    for each in sockets:
        each.close()
    return addresses


def _print_lines(index: int, process: subprocess.Popen) -> None:
    for line in process.stdout:
        print(f'worker {index} | {line}', end='', flush=True)


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
