"""What a person is told to run works where it is pasted: it begins as the person's own command did."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from ctl.commands import command
from tests import image_records
from tests.runs import DEADLINE, ROOT, door, overrides, paste, printed_after, write_shallow
from tools.launch import free_addresses

SHOW = 'from ctl.commands import command; print(command("tools.index_records", "--help"))'


def shown_by(*words, **environment):
    """The command that a Python started in this way would print."""
    done = subprocess.run([*words, '-c', SHOW], env=environment, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def without_uv(**changed):
    return {**{k: v for k, v in os.environ.items() if k not in ('UV', 'VIRTUAL_ENV')}, **changed}


def check_help(line, **how):
    done = paste(line, **how)
    assert done.returncode == 0 and done.stdout.startswith('usage: '), (line, done.stderr)


def test_the_interpreter_is_named_by_its_path_where_python_is_another(tmp_path):
    environment = without_uv(PATH='/usr/bin:/bin')
    line = shown_by(sys.executable, **environment)
    assert line == f'{sys.executable} -m tools.index_records --help'
    check_help(line, env=environment)


def test_in_an_environment_that_is_active_the_word_is_python():
    environment = without_uv(PATH=f'{pathlib.Path(sys.executable).parent}:/usr/bin:/bin')
    line = shown_by('python', **environment)
    assert line == 'python -m tools.index_records --help'
    check_help(line, env=environment)


in_a_project_of_uv = pytest.mark.skipif(
    shutil.which('uv') is None or pathlib.Path(sys.prefix) != ROOT / '.venv', reason='not an environment that uv made'
)


@in_a_project_of_uv
@pytest.mark.parametrize('folder, begins', [(ROOT, 'uv run python'), (None, f'uv run --project {ROOT} python')])
def test_under_uv_it_begins_with_uv_run_and_names_the_project_from_elsewhere(folder, begins, tmp_path, monkeypatch):
    monkeypatch.chdir(folder or tmp_path)
    line = shown_by('uv', 'run', '--project', str(ROOT), 'python', **without_uv())
    assert line == f'{begins} -m tools.index_records --help'
    check_help(line, env=without_uv())


def test_a_tool_started_by_its_path_prints_commands_with_paths(tmp_path, monkeypatch):
    """Beside a `tools` of one's own, `-m tools.name` would find that."""
    (tmp_path / 'tools').mkdir()
    (tmp_path / 'tools' / '__init__.py').write_text('raise ImportError("not yours")')
    monkeypatch.chdir(tmp_path)
    program = ROOT / 'tools' / 'index_records.py'
    done = subprocess.run([sys.executable, str(program), '--help'], capture_output=True, text=True, timeout=DEADLINE)
    usage = done.stdout.partition('\n')[0]
    assert str(program) in usage and '-m' not in usage, done.stderr
    check_help(usage.removeprefix('usage: ').partition(' [')[0] + ' --help')


def test_words_are_quoted_for_a_shell():
    assert command('ctl.train', '--workdir=a b').endswith("-m ctl.train '--workdir=a b'")


@pytest.mark.slow
def test_the_remedy_of_an_experiment_without_images_makes_records_of_them(tmp_path, capsys):
    assert door('--experiment=gan_images', f'--workdir={tmp_path / "run"}') == 2
    line = printed_after('prints the command: ', capsys.readouterr().err).replace('FOLDER', 'photos')
    photos = tmp_path / 'photos'
    photos.mkdir()
    for i, record in enumerate(image_records.make_images(40)):
        (photos / f'{i}.png').write_bytes(record['image'])
    done = paste(f'{line} --size=8', cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    train = printed_after('Train on them with:\n', done.stdout)
    done = paste(f'{train} --config.train.global_batch_size=8 --config.model.generator_width=4 --dry_run', cwd=tmp_path)
    assert done.returncode == 0 and 'Dry run: the run could start.' in done.stdout, done.stderr


@pytest.mark.slow
def test_tensorboard_starts_with_the_command_that_a_run_prints_and_shows_its_numbers_and_pictures(tmp_path, capsys):
    words = [*image_records.write_data(tmp_path), *overrides(train__steps=2), f'--workdir={tmp_path / "run"}']
    assert door(*words) == 0
    line = printed_after('TensorBoard ', capsys.readouterr().out)
    port = free_addresses(1)[0].rpartition(':')[2]
    process = subprocess.Popen(
        ['bash', '-c', f'exec {line} --port={port}'],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        scalars = ask(process, f'http://127.0.0.1:{port}/data/plugin/scalars/tags', runs=2)
        images = ask(process, f'http://127.0.0.1:{port}/data/plugin/images/tags', runs=1)
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # uv starts another
        process.communicate()
    assert {'train', 'eval'} <= scalars.keys()
    groups = {tag.partition('/')[0] for tags in scalars.values() for tag in tags}
    assert groups == {'loss', 'generator', 'discriminator', 'metrics', 'speed'}
    assert any('samples' in tag for tags in images.values() for tag in tags)


def ask(process, address, runs):
    """What TensorBoard answers once it has read so many runs: run -> tags."""
    deadline = time.monotonic() + DEADLINE
    answer = {}
    while time.monotonic() < deadline:
        assert process.poll() is None, process.stderr.read()
        try:
            with urllib.request.urlopen(address, timeout=30) as response:
                answer = json.load(response)
        except OSError:
            answer = {}
        if sum(map(bool, answer.values())) >= runs:
            return answer
        time.sleep(0.2)
    raise AssertionError(f'TensorBoard has only {answer}')


@pytest.mark.slow
def test_go_on_with_goes_on(tmp_path, capsys, monkeypatch):
    """The command of a run that was interrupted, pasted: the run comes to its end."""
    from ctl.runtime import signals

    words = [
        *write_shallow(tmp_path),
        *overrides(train__steps=3, checkpoint__every=1),
        f'--workdir={tmp_path / "a run"}',
    ]
    monkeypatch.setattr(signals.Stop, 'check', interrupt)
    assert door(*words) == 75
    monkeypatch.undo()
    line = printed_after('Go on with: ', capsys.readouterr().err)
    done = paste(line)
    assert done.returncode == 0 and 'step 3/3' in done.stdout, done.stderr


def interrupt(self):
    from ctl.errors import Interrupted

    raise Interrupted('a signal')
