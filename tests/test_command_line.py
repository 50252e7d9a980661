"""Every program has one kind of command line: `--help` says what it does, and a mistake is one line."""

import importlib
import pathlib
import subprocess
import sys

import pytest

import tools.__main__ as tools_main
from ctl import flags
from ctl.command_line import Program, Request
from ctl.data.inputs import choose_data
from ctl.errors import UserError
from tests.runs import ROOT, Workdir, door, overrides, write_data

pytestmark = pytest.mark.xdist_group('command_line')  # for the run that these tests share

PROGRAMS = ['ctl.train', 'tools.__main__', *(f'tools.{name}' for name in tools_main.find_programs())]


def test_every_file_in_tools_that_can_be_started_is_a_program():
    started = {path.stem for path in (ROOT / 'tools').glob('[!_]*.py') if "__name__ == '__main__'" in path.read_text()}
    assert started == set(tools_main.find_programs()) and len(started) > 8


@pytest.mark.parametrize('module', PROGRAMS)
def test_help_says_how_to_start_a_program_what_it_does_and_its_flags(module, capsys):
    program = importlib.import_module(module)
    assert program.main(['--help']) == 0
    out = capsys.readouterr().out
    assert out.startswith('usage: ') and f'-m {program.PROGRAM.name}' in out.partition('\n')[0]
    assert program.__doc__.strip() in out
    values = program.PROGRAM.make_flags()
    assert all(f'--{name} ' in out and values[name].help in out for name in values)


@pytest.mark.parametrize('module', PROGRAMS)
def test_a_flag_that_is_none_is_one_line_and_exit_2(module, capsys):
    assert importlib.import_module(module).main(['--thre_is_no_such=1']) == 2
    captured = capsys.readouterr()
    assert captured.out == '' and captured.err.count('\n') == 1
    assert captured.err.startswith('error: --thre_is_no_such: there is no such flag; ')


def test_programs_begin_without_tensorflow():
    """So that help and mistakes come at once; but for experiments' own settings, which their files have."""
    code = f'import sys, {", ".join(PROGRAMS)}; sys.exit("tensorflow" in sys.modules)'
    assert subprocess.run([sys.executable, '-c', code]).returncode == 0


def define(values):
    flags.flags.DEFINE_integer('size', 3, 'how large', lower_bound=1, flag_values=values)
    flags.flags.DEFINE_string('output', None, 'where to', flag_values=values)


PROGRAM = Program('tools.some', 'Does something.', define, words='FOLDER', least=1, most=1, needed=('output',))


@pytest.mark.parametrize(
    'words, said',
    [
        (['here'], '--output must be given. Usage: '),
        (['--output=there'], 'FOLDER is missing. Usage: '),
        (['here', 'there', '--output=x'], 'there: is one too many. Usage: '),
        (['here', '--output=x', '--size=0'], '--size=0'),
        (['here', '--output=x', '--size=big'], '--size=big'),
        (['here', '--output=x', '--szie=2'], '--szie: there is no such flag; did you mean --size?'),
    ],
)
def test_a_mistake_names_the_flag_and_the_remedy(words, said):
    with pytest.raises(UserError) as error:
        PROGRAM.parse(words)
    assert said in str(error.value) and '\n' not in str(error.value)


def test_flags_and_words_come_to_the_program_in_any_order():
    request = PROGRAM.parse(['--size=5', 'here', '--output=x y'])
    assert isinstance(request, Request) and request.words == ('here',)
    assert request.own == {'size': 5, 'output': 'x y'}
    assert request.command.endswith("-m tools.some --size=5 here '--output=x y'")


def test_a_program_ends_with_what_its_body_returns_or_raises():
    words = ['here', '--output=x']
    assert [PROGRAM.run(words, lambda request, code=code: code) for code in (None, 0, 75)] == [0, 0, 75]

    def fail(request):
        raise UserError('no.')

    assert PROGRAM.run(words, fail) == 2


def test_windows_is_told_what_to_do_instead(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'platform', 'win32')
    assert door('--experiment=bert_mlm') == 2
    assert 'WSL2' in capsys.readouterr().err


READER = flags.ExperimentProgram('tools.reader', 'Reads.', only_reads=True)
TRAINER = flags.ExperimentProgram('tools.trainer', 'Trains.')


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """A run of one step, and the flags it was started with."""
    folder = tmp_path_factory.mktemp('run')
    words = [*write_data(folder), *overrides(train__steps=1, data__logical_shards=2)]
    assert door(*words, f'--workdir={folder / "run"}') == 0
    return Workdir(folder / 'run'), words


def test_with_a_workdir_a_reading_program_needs_no_other_flag(run):
    workdir, words = run
    request = READER.parse([f'--workdir={workdir.path}'])
    assert request.name == 'bert_mlm' and request.config.to_dict() == workdir.config
    assert READER.parse([*words, f'--workdir={workdir.path}']).config.to_dict() == workdir.config


def test_without_a_workdir_a_reading_program_takes_the_flags_alone(run, monkeypatch):
    """What a run has left at the default place does not bind it."""
    workdir, words = run
    here = pathlib.Path('runs')
    here.mkdir()
    (here / 'bert_mlm').symlink_to(workdir.path)
    assert READER.parse([*words, '--config.train.seed=5']).config.train.seed == 5
    assert READER.parse(['--experiment=bert_mlm']).config.data.train == ''


def test_more_settings_for_a_workdir_are_as_for_a_later_start(run):
    workdir, _ = run
    request = READER.parse([f'--workdir={workdir.path}', '--config.train.steps=9', '--config.devices.replicas=2'])
    assert (request.config.train.steps, request.config.devices.replicas) == (9, 2)
    with pytest.raises(UserError, match='this workdir holds a run with other settings: train.seed was 0 and is 5'):
        choose([f'--workdir={workdir.path}', '--config.train.seed=5'])


def choose(words):
    """What a reading program does with its command line first; the request."""
    request = READER.parse(words)
    choose_data(request.name, request.module, request.config, print, request.stored)
    return request


def test_data_that_an_experiment_made_itself_is_found_or_made_again_with_the_workdir_alone(run, tmp_path, capsys):
    workdir, words = run
    folder = tmp_path / 'made'
    folder.mkdir()
    (tmp_path / 'own.py').write_text(
        'from experiments import bert_mlm\nfrom ctl.experiment import DefaultData\nfrom tests import runs\n'
        'from tests.shallow_bert import get_config, make_experiment\nimport pathlib\n\n\n'
        f'def make_default_data(config, say):\n    say("making")\n    runs.write_data(pathlib.Path({str(folder)!r}))\n'
        f'    return DefaultData("{folder}/train*", "{folder}/eval*", "its own")\n'
    )
    others = ('--experiment', '--config.data.train', '--config.data.eval')
    words = [word for word in words if not word.startswith(others)]
    words += [f'--experiment={tmp_path / "own.py"}', f'--workdir={tmp_path / "run"}']
    assert door(*words) == 0
    for path in folder.iterdir():
        path.unlink()
    capsys.readouterr()
    assert choose([f'--workdir={tmp_path / "run"}']).config.to_dict() == Workdir(tmp_path / 'run').config
    assert 'making' in capsys.readouterr().out and len(list(folder.iterdir())) == 6


def test_the_run_of_several_workers_is_looked_at_by_one(run, tmp_path):
    workdir, _ = run
    for name in ('config.json', 'run.json'):
        text = (workdir.path / name).read_text()
        (tmp_path / name).write_text(text.replace('"strategy": "auto"', '"strategy": "multi_worker"'))
    assert choose([f'--workdir={tmp_path}']).config.devices.strategy == 'auto'


def test_a_setting_that_has_another_type_now_is_named_with_both_values(run, tmp_path):
    workdir, _ = run
    for name in ('config.json', 'run.json', 'metrics.jsonl'):
        (tmp_path / name).write_text((workdir.path / name).read_text().replace('"seed": 0', '"seed": "zero"'))
    with pytest.raises(UserError, match="train.seed was 'zero' and is 0"):
        choose([f'--workdir={tmp_path}'])


def test_a_file_of_ones_own_may_be_renamed(tmp_path, run):
    workdir, words = run
    words = [word for word in words if not word.startswith('--experiment')]
    for name in ('before.py', 'after.py'):
        (tmp_path / name).write_text('from experiments.bert_mlm import *\n')
        TRAINER.parse([*words, f'--experiment={tmp_path / name}', f'--workdir={tmp_path / "run"}'])
        (tmp_path / 'run').mkdir(exist_ok=True)
        (tmp_path / 'run' / 'config.json').write_text((workdir.path / 'config.json').read_text())
        (tmp_path / 'run' / 'run.json').write_text(f'{{"experiment": "{tmp_path / name}"}}')


def test_a_tilde_that_the_shell_has_left_is_the_home(monkeypatch, tmp_path):
    monkeypatch.setenv('HOME', str(tmp_path))
    (tmp_path / 'mine.py').write_text('from experiments.bert_mlm import *\n')
    request = TRAINER.parse(['--experiment=~/mine.py', '--workdir=~/run'])
    assert (request.experiment, request.workdir) == (str(tmp_path / 'mine.py'), tmp_path / 'run')


def test_a_config_that_is_no_object_is_refused(tmp_path):
    (tmp_path / 'config.json').write_text('[]')
    with pytest.raises(UserError, match='config.json holds no JSON object: restore it'):
        READER.parse([f'--workdir={tmp_path}', '--experiment=bert_mlm'])


def test_a_file_of_ones_own_that_is_gone_is_asked_for(run, tmp_path):
    workdir, _ = run
    (tmp_path / 'config.json').write_text((workdir.path / 'config.json').read_text())
    (tmp_path / 'run.json').write_text('{"experiment": "/nowhere/mine.py"}')
    with pytest.raises(UserError, match='the run in it is of /nowhere/mine.py, which is not there any more. Say with'):
        READER.parse([f'--workdir={tmp_path}'])


def test_who_has_read_enough_of_what_is_printed_ends_the_program_quietly():
    done = subprocess.run(
        ['bash', '-c', f'set -o pipefail; {sys.executable} -m tools | true'], capture_output=True, text=True
    )
    assert done.stderr == ''


def test_a_workdir_where_no_run_is_yet_is_said(tmp_path, capsys):
    READER.parse(['--experiment=bert_mlm', f'--workdir={tmp_path}'])
    assert f'--workdir={tmp_path}: no run is there yet' in capsys.readouterr().err
    with pytest.raises(UserError, match='no run is there: --experiment is missing; there are: bert_mlm'):
        READER.parse([f'--workdir={tmp_path}'])


def test_a_workdir_from_before_experiments_were_noted_asks_for_the_experiment(run, tmp_path):
    workdir, _ = run
    (tmp_path / 'config.json').write_text((workdir.path / 'config.json').read_text())
    with pytest.raises(UserError, match='does not say of which experiment it is: --experiment is missing'):
        READER.parse([f'--workdir={tmp_path}'])
    request = READER.parse([f'--workdir={tmp_path}', '--experiment=bert_mlm'])
    assert request.config.to_dict() == workdir.config


@pytest.mark.parametrize('program', [READER, TRAINER])
def test_a_workdir_of_another_experiment_is_refused_by_name(run, program):
    workdir, _ = run
    with pytest.raises(UserError, match='--experiment=gan_digits: the run in .* is of bert_mlm.'):
        program.parse([f'--workdir={workdir.path}', '--experiment=gan_digits'])


def test_a_file_of_ones_own_is_noted_by_its_absolute_path_and_found_from_another_folder(tmp_path, monkeypatch):
    folder = tmp_path / 'mine'
    folder.mkdir()
    words = [word for word in write_data(folder) if not word.startswith('--experiment')]
    (folder / 'own.py').write_text('from tests.shallow_bert import *\n')
    monkeypatch.chdir(folder)
    assert door('--experiment=own.py', *words, '--config.train.steps=1', '--workdir=run') == 0
    monkeypatch.chdir(tmp_path)
    request = READER.parse(['--workdir=mine/run'])
    assert request.experiment == str(folder / 'own.py') and request.name == 'own'


def test_a_run_goes_on_with_its_workdir_alone(run, capsys):
    workdir, words = run
    assert door(f'--workdir={workdir.path}') == 0
    assert 'Already at step 1 of 1.' in capsys.readouterr().out
