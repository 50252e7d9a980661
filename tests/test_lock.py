"""One run a workdir."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from ctl.errors import UserError
from ctl.runtime.lock import owned

HOLD = """
import pathlib, sys
from ctl.runtime.lock import owned
with owned(pathlib.Path(sys.argv[1]), print):
    print('held', flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the workdir."""
    with subprocess.Popen(
        [sys.executable, '-c', HOLD, str(tmp_path / 'run')], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == 'held\n'
        try:
            yield process
        finally:
            process.kill()


def take(workdir):
    with owned(workdir, print):
        pass


def test_a_second_run_is_refused_with_who_has_the_workdir(holder, tmp_path):
    with pytest.raises(UserError, match=rf'is in use by process {holder.pid} on {socket.gethostname()}, started 20'):
        take(tmp_path / 'run')


def test_the_lock_of_a_killed_process_is_taken_over_with_a_line(holder, tmp_path):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    said = []
    with owned(tmp_path / 'run', said.append):
        assert json.loads((tmp_path / 'run' / 'lock').read_text())['process'] == os.getpid()
    assert len(said) == 1 and f'Taking over the workdir from process {holder.pid}' in said[0]


def test_the_lock_of_another_machine_is_only_taken_over_when_told(tmp_path):
    lock = tmp_path / 'lock'
    lock.write_text(json.dumps({'host': 'elsewhere', 'process': 1, 'started': '2020-01-01 00:00:00'}))
    with pytest.raises(UserError, match='process 1 on elsewhere, .* take over with --break_lock'):
        take(tmp_path)
    assert lock.exists()
    with owned(tmp_path, print, break_lock=True):
        pass
    assert not lock.exists()


def test_nothing_is_left_at_the_end_and_an_empty_workdir_is_not_left_either(tmp_path):
    with owned(tmp_path / 'a' / 'run', print):
        assert (tmp_path / 'a' / 'run' / 'lock').exists()
    assert not (tmp_path / 'a' / 'run').exists()
    with owned(tmp_path / 'a' / 'run', print):
        (tmp_path / 'a' / 'run' / 'file').touch()
    assert os.listdir(tmp_path / 'a' / 'run') == ['file']


def test_a_lock_that_was_cut_off_by_a_kill_is_no_obstacle(tmp_path):
    (tmp_path / 'lock').write_text('{"host": "else')
    with owned(tmp_path, print):
        pass
