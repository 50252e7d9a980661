"""One run a workdir, on one machine and on several."""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from ctl.errors import Interrupted, UserError, WorkdirGone
from ctl.runtime import lock
from ctl.runtime.lock import owned
from tests.runs import DEADLINE, Workdir, door, overrides, write_shallow

HOLD = """
import pathlib, sys
from ctl.errors import WorkdirLost
from ctl.runtime import lock
lock.BEAT_SECONDS = 0.05
if len(sys.argv) > 2:
    lock.boot_id = lambda: sys.argv[2]
with lock.owned(pathlib.Path(sys.argv[1]), print) as lease:
    print('held', flush=True)
    sys.stdin.read()
    try:
        lease.check()
    except WorkdirLost as lost:
        print(lost, flush=True)
"""


@contextlib.contextmanager
def holding(workdir, *boot):
    """Another process that holds the workdir, on another machine where `boot` is given."""
    with subprocess.Popen(
        [sys.executable, '-c', HOLD, str(workdir), *boot], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == 'held\n'
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def soon(monkeypatch):
    """Signs of life are looked for, and missed, a hundred times as soon."""
    for name in ('BEAT_SECONDS', 'STALE_SECONDS', 'LOOK_SECONDS'):
        monkeypatch.setattr(lock, name, getattr(lock, name) / 100)


def take(workdir, **how):
    with owned(workdir, print, **how):
        pass


def read(workdir):
    return json.loads((workdir / 'lock').read_text())


def write(workdir, **owner):
    """What another machine has written."""
    owner = {'host': 'elsewhere', 'process': 1, 'started': '2020-01-01 00:00:00', 'boot': 'b', 'token': 't', **owner}
    workdir.mkdir(exist_ok=True)
    (workdir / 'lock').write_text(json.dumps(owner))


def test_a_second_run_is_refused_with_who_has_the_workdir(tmp_path):
    with holding(tmp_path / 'run') as holder:
        who = rf'is in use by process {holder.pid} on {socket.gethostname()}, started 20'
        with pytest.raises(UserError, match=who):
            take(tmp_path / 'run', patience=DEADLINE)


def test_the_lock_of_a_killed_process_is_taken_over_at_once_with_a_line(tmp_path):
    with holding(tmp_path / 'run') as holder:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    said = []
    with owned(tmp_path / 'run', said.append):
        assert read(tmp_path / 'run')['process'] == os.getpid()
    assert len(said) == 1 and f'Taking over the workdir from process {holder.pid}' in said[0]


@pytest.mark.parametrize(
    'other', [{}, {'host': socket.gethostname()}, {'boot': '', 'token': ''}], ids=['named', 'pod', 'older']
)
def test_a_lock_of_another_machine_is_taken_over_when_it_gives_no_sign_of_life(tmp_path, soon, other):
    """Also one of the same name, which a pod that is made again has; and one of a version that gave no signs."""
    run = tmp_path / 'run'
    write(run, **other)
    said, began = [], time.monotonic()
    with owned(run, said.append):
        assert time.monotonic() - began >= lock.STALE_SECONDS
        assert read(run)['process'] == os.getpid()
    assert 'another machine: waiting for its end, or until it has given no sign of life for 0.9 s' in said[0]
    assert said[1].startswith('Taking over the workdir from process 1 on ')
    assert os.listdir(tmp_path) == []


def test_a_run_on_another_machine_that_lives_is_waited_for_and_then_named(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, 'LOOK_SECONDS', 0.01)  # and a sign of life may be late, on a busy machine
    with holding(tmp_path, 'another boot') as holder:
        for how in ({'patience': 2.0}, {'patience': 0.0, 'break_lock': True}):
            with pytest.raises(UserError, match=f'process {holder.pid} on .*, another machine, and that run is alive'):
                take(tmp_path, **how)
        assert read(tmp_path)['process'] == holder.pid
        threading.Timer(0.5, holder.stdin.close).start()  # and when it ends, it is waited for no more
        take(tmp_path, patience=DEADLINE)


def test_waiting_can_be_ended(tmp_path):
    write(tmp_path)

    def check():
        raise Interrupted('SIGTERM received')

    with pytest.raises(Interrupted):
        take(tmp_path, check=check)


def test_a_run_that_stood_still_and_was_taken_over_notices_and_leaves_the_lock_to_the_other(tmp_path, soon):
    run = tmp_path / 'run'
    with holding(run, 'another boot') as holder:
        holder.send_signal(signal.SIGSTOP)
        with owned(run, print) as lease:
            holder.send_signal(signal.SIGCONT)
            said, _ = holder.communicate(timeout=DEADLINE)
            assert f'is not ours any more: process {os.getpid()} on' in said
            lease.check()
            assert read(run)['process'] == os.getpid()
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize('lost_in', ['Reporter.__call__', 'Evaluation._measure'])
def test_a_run_that_was_taken_over_writes_nothing_more_and_ends_with_75(tmp_path, capsys, monkeypatch, lost_in):
    """Between two loops, or in an evaluation, which may take long."""
    from ctl.runtime import actions

    workdir = tmp_path / 'run'
    owner, name = getattr(actions, lost_in.partition('.')[0]), lost_in.partition('.')[2]
    do = getattr(owner, name)

    def do_and_lose(self, *arguments):
        done = do(self, *arguments)
        write(workdir, token='of another')
        return done

    monkeypatch.setattr(owner, name, do_and_lose)
    words = overrides(train__steps=5, eval__every=1, checkpoint__every=1, checkpoint__best_metric='loss')
    assert door(*write_shallow(tmp_path), *words, f'--workdir={workdir}') == 75
    error = capsys.readouterr().err
    assert 'is not ours any more: process 1 on elsewhere' in error and 'Go on with' not in error
    assert [(line['step'], line['kind']) for line in Workdir(workdir).metrics] == [(1, 'train')]
    assert not list(workdir.glob('checkpoints/**/*.index')) and not (workdir / 'checkpoints' / 'best').exists()
    assert read(workdir)['token'] == 'of another'


@pytest.mark.parametrize('number', lock.NO_FLOCK)
def test_without_locks_of_the_operating_system_signs_of_life_tell_alone(tmp_path, soon, monkeypatch, number):
    def flock(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, 'flock', flock)
    stale_seconds = lock.STALE_SECONDS
    monkeypatch.setattr(lock, 'STALE_SECONDS', float(DEADLINE))  # a sign of life may be late, on a busy machine
    said, run = [], tmp_path / 'run'
    with owned(run, said.append):
        assert len(said) == 1 and f'on a file system without locks ({os.strerror(number)})' in said[0]
        with pytest.raises(UserError, match='that run is alive'):
            take(run, patience=1.0)
    assert os.listdir(tmp_path) == []
    # What a kill leaves, on this very machine.
    monkeypatch.setattr(lock, 'STALE_SECONDS', stale_seconds)
    write(run, boot=lock.boot_id())
    take(run)


def test_an_error_of_the_run_is_none_of_the_lock(tmp_path):
    with pytest.raises(OSError) as raised, owned(tmp_path / 'run', print):
        raise OSError(errno.ENOSPC, 'full')
    assert raised.value.errno == errno.ENOSPC
    assert not (tmp_path / 'run').exists()


def test_a_lock_that_was_removed_by_hand_ends_the_run(tmp_path):
    with owned(tmp_path / 'run', print) as lease:
        lease.check()
        (tmp_path / 'run' / 'lock').unlink()
        with pytest.raises(WorkdirGone, match='the folder was moved, removed or tidied up'):
            lease.check()


def test_of_many_that_wait_one_takes_it(tmp_path, soon, monkeypatch):
    """Each in a thread, on a file system without locks, so that only the file tells."""
    monkeypatch.setattr(lock, 'STALE_SECONDS', 5.0)  # long, for a thread that has to come to its beat
    write(tmp_path)
    held, most, turn = [], [], threading.Lock()

    def start(i):
        with owned(tmp_path, lambda text: None, patience=DEADLINE) as lease:
            with turn:
                held.append(i)
                most.append(len(held))
            time.sleep(0.05)
            lease.check()
            with turn:
                held.remove(i)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lock, 'boot_id', lambda: f'boot of {threading.get_ident()}')
        threads = [threading.Thread(target=start, args=[i]) for i in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)
            assert not thread.is_alive()
    assert most == [1] * 5


def test_a_folder_that_its_last_owner_removes_in_this_moment_is_made_anew(tmp_path, monkeypatch):
    made, removed = pathlib.Path.mkdir, []

    def mkdir(path, *args, **settings):
        made(path, *args, **settings)
        if path == tmp_path / 'run' and len(removed) < 3:
            removed.append(path.rmdir())
            if len(removed) == 2:
                raise FileExistsError(errno.EEXIST, 'File exists')

    monkeypatch.setattr(pathlib.Path, 'mkdir', mkdir)
    with owned(tmp_path / 'run', print) as lease:
        lease.check()
    assert len(removed) == 3


def test_nothing_is_left_at_the_end_and_an_empty_workdir_is_not_left_either(tmp_path):
    with owned(tmp_path / 'a' / 'run', print):
        assert (tmp_path / 'a' / 'run' / 'lock').exists()
    assert not (tmp_path / 'a' / 'run').exists()
    with owned(tmp_path / 'a' / 'run', print):
        (tmp_path / 'a' / 'run' / 'file').touch()
    assert os.listdir(tmp_path / 'a' / 'run') == ['file']


@pytest.mark.parametrize('left', ['{"host": "else', '[]', '\0' * 40, 'é'])
def test_a_lock_that_was_cut_off_by_a_kill_is_no_obstacle(tmp_path, soon, left):
    (tmp_path / 'lock').write_text(left)
    take(tmp_path)
