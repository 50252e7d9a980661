"""Programs whose output nobody reads any more."""

import errno
import os
import shlex
import signal
import subprocess
import sys

import pytest

from ctl.errors import UserError, exit_code_of
from ctl.output import lasting
from tests.runs import DEADLINE, ROOT, Workdir, overrides, write_shallow


@pytest.mark.slow
def test_a_run_whose_output_nobody_reads_goes_on_and_says_so(tmp_path):  # N28
    words = [*write_shallow(tmp_path), *overrides(train__steps=3), f'--workdir={tmp_path / "run"}']
    line = ' '.join(f"'{word}'" for word in [sys.executable, '-m', 'ctl.train', *words])
    ended = subprocess.run(
        ['bash', '-c', f'{line} | head -1; exit ${{PIPESTATUS[0]}}'],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        cwd=ROOT,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == 'standard output cannot be written (Broken pipe): the run goes on without it.\n'
    assert [line['step'] for line in Workdir(tmp_path / 'run').lines('train')] == [1, 2, 3]


def test_a_program_that_only_says_something_ends_quietly_when_nobody_listens():
    line = f'{sys.executable} -m tools | head -1; exit ${{PIPESTATUS[0]}}'
    help_text = f'{sys.executable} -m ctl.train --help | head -1; exit ${{PIPESTATUS[0]}}'
    for each in (line, help_text):
        ended = subprocess.run(['bash', '-c', each], capture_output=True, text=True, timeout=DEADLINE, cwd=ROOT)
        assert 'Traceback' not in ended.stderr and ended.stdout.count('\n') == 1


@pytest.mark.parametrize('number', [errno.EPIPE, errno.ENOSPC, errno.EIO])
def test_what_follows_an_error_of_the_stream_is_lost_and_nothing_else(tmp_path, monkeypatch, number):
    class Gone:
        """A stream that fails once it is written to; what takes its place is the null device."""

        def __init__(self, name):
            self._number = os.open(tmp_path / name, os.O_WRONLY | os.O_CREAT)

        def fileno(self):
            return self._number

        def write(self, text=''):
            raise OSError(number, os.strerror(number))

        flush = write

    out, err = Gone('out'), Gone('err')
    monkeypatch.setattr(sys, 'stdout', out)
    monkeypatch.setattr(sys, 'stderr', err)
    with lasting():
        print('one')
        print('two', file=sys.stderr, flush=True)
        print('three', flush=True)
    assert (sys.stdout, sys.stderr) == (out, err)
    for stream in (out, err):
        assert os.path.samestat(os.fstat(stream.fileno()), os.stat(os.devnull))
        os.close(stream.fileno())


@pytest.mark.parametrize('streams', ['>&-', '2>&-', '<&- >&- 2>&-'])
def test_a_program_without_standard_streams_does_its_work(tmp_path, streams):
    """Nor does a file get the number of one, with what is printed in it."""
    note = tmp_path / 'note'
    program = (
        'from ctl.command_line import Program\n'
        'def body(request):\n'
        f'    with open({str(note)!r}, "w") as file:\n'
        '        print("said")\n'
        '        file.write("written")\n'
        'raise SystemExit(Program("tools.any", "", outlives_output=True).run([], body))\n'
    )
    line = f'{shlex.quote(sys.executable)} -c {shlex.quote(program)} {streams}'
    assert subprocess.run(['bash', '-c', line], cwd=ROOT, timeout=DEADLINE, capture_output=True).returncode == 0
    assert note.read_text() == 'written'


def test_a_full_disk_under_what_is_printed_is_one_line():
    line = f"'{sys.executable}' -m tools > /dev/full"
    ended = subprocess.run(['bash', '-c', line], cwd=ROOT, timeout=DEADLINE, capture_output=True, text=True)
    assert ended.returncode == 3
    assert ended.stderr == 'error: standard output cannot be written: No space left on device.\n'


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGHUP])
def test_a_tool_that_a_signal_ends_leaves_nothing_half_made(tmp_path, number):
    program = (
        'import os, signal\n'
        'from ctl.command_line import Program\n'
        'from ctl.files import appears_whole\n'
        'def body(request):\n'
        f'    with appears_whole(__import__("pathlib").Path({str(tmp_path / "made")!r})) as scratch:\n'
        '        scratch.mkdir()\n'
        f'        os.kill(os.getpid(), {int(number)})\n'
        'raise SystemExit(Program("tools.any", "").run([], body))\n'
    )
    ended = subprocess.run([sys.executable, '-c', program], cwd=ROOT, timeout=DEADLINE, capture_output=True)
    assert ended.returncode == 128 + number and not ended.stderr
    assert not list(tmp_path.iterdir())


def test_a_name_that_would_move_the_cursor_is_shown_as_it_is_written(capsys):
    def program():
        raise UserError('a\rb\x1b[2Kc\nd: é')

    assert exit_code_of(program) == 2
    assert capsys.readouterr().err == r'error: a\rb\x1b[2Kc\nd: é' + '\n'
