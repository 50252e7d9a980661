"""What is installed is what pyproject.toml says, by either way of installing."""

import ast
import importlib.metadata
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.runs import DEADLINE, write_data

ROOT = pathlib.Path(__file__).resolve().parent.parent


def read_pyproject(folder=ROOT):
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # pytest brings it
    return tomllib.loads((folder / 'pyproject.toml').read_text())


PYPROJECT = read_pyproject()


def pinned(lines=None):
    """name -> version, for this Python and platform; of requirements.txt, or of other lines like its."""
    lines = lines or (ROOT / 'requirements.txt').read_text().splitlines()
    requirements = [Requirement(line) for line in lines if line.strip()]
    return {
        canonicalize_name(r.name): str(r.specifier).removeprefix('==')
        for r in requirements
        if r.marker is None or r.marker.evaluate()
    }


def test_requirements_meet_what_pyproject_asks_for():
    for requirement in map(Requirement, PYPROJECT['project']['dependencies']):
        assert requirement.specifier.contains(pinned()[canonicalize_name(requirement.name)]), requirement


def test_requirements_are_all_that_the_dependencies_need_and_no_more():
    excluded = {canonicalize_name(name) for name in PYPROJECT['tool']['uv']['exclude-dependencies']}
    needed, open_ends = set(), [Requirement(r) for r in PYPROJECT['project']['dependencies']]
    while open_ends:
        requirement = open_ends.pop()
        name = canonicalize_name(requirement.name)
        if name in needed | excluded or (requirement.marker and not requirement.marker.evaluate({'extra': ''})):
            continue
        needed.add(name)
        open_ends += [Requirement(r) for r in importlib.metadata.requires(name) or []]
    assert needed == set(pinned())


def test_everything_that_is_installed_is_at_the_version_that_pyproject_pins():
    """What is tested today is what is installed next month: uv keeps to the constraints, pip to requirements.txt."""
    constraints = pinned(PYPROJECT['tool']['uv']['constraint-dependencies'])
    installed = {canonicalize_name(d.name): d.version for d in importlib.metadata.distributions()}
    others = {'ctl', 'pip', 'uv'}  # not of the project, where they are there
    assert {name: version for name, version in installed.items() if name not in others | constraints.keys()} == {}
    assert {name: constraints[name] for name in installed.keys() - others} == {
        name: version for name, version in installed.items() if name not in others
    }
    assert pinned().items() <= constraints.items()


def test_pinned_versions_name_no_host_and_no_hash():
    constraints = '\n'.join(PYPROJECT['tool']['uv']['constraint-dependencies'])
    assert not re.search(r'://|--hash|--index|--find', (ROOT / 'requirements.txt').read_text() + constraints)


def test_versions_are_renewed_in_both_files_and_nothing_else_is_touched(tmp_path, monkeypatch):
    """With an uv of our own, that finds one version of everything."""
    from tools import pin_versions

    for name in ('pyproject.toml', 'requirements.txt'):
        (tmp_path / name).write_text((ROOT / name).read_text())
    solved = {'--no-dev': 'numpy==9\n', '--all-groups': "numpy==9\npytest==9 ; python_full_version < '3.11'\n"}
    monkeypatch.setattr(pin_versions, 'ROOT', tmp_path)
    monkeypatch.setattr(pin_versions, '_uv', lambda folder, *words: solved.get(words[-1], ''))
    assert pin_versions.main([]) == 0
    assert (tmp_path / 'requirements.txt').read_text() == solved['--no-dev']
    before, after = (read_pyproject(folder) for folder in (ROOT, tmp_path))
    assert after['tool']['uv'].pop('constraint-dependencies') == solved['--all-groups'].splitlines()
    before['tool']['uv'].pop('constraint-dependencies')
    assert before == after


def test_the_lock_file_stays_out_of_git():
    assert 'uv.lock' in (ROOT / '.gitignore').read_text().splitlines()


def test_orbit_is_the_one_of_the_model_garden():
    import orbit

    assert 'tf-models-official' in importlib.metadata.packages_distributions()['orbit']
    assert orbit.Controller and orbit.StandardTrainer and orbit.StandardEvaluator


@pytest.mark.parametrize('path', sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob('[ce]*/**/*.py')))
def test_imports_point_one_way(path):
    """experiments -> tools -> ctl; data knows nothing of the step, and only the loop knows the runtime."""
    tree = ast.parse((ROOT / path).read_text())
    imported = {node.module or '' for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    if path.startswith('ctl/'):
        assert not any(name.startswith(('experiments', 'tools')) for name in imported)
    if path.startswith('ctl/data/'):
        assert not any(
            name.startswith(('ctl.step', 'ctl.update', 'ctl.gan', 'ctl.runtime', 'ctl.loop')) for name in imported
        )
    if path == 'ctl/data/shards.py':
        assert not any(name.startswith(('tensorflow', 'keras')) for name in imported)


def test_nothing_needs_the_estimator_that_tensorflow_no_longer_has():  # C41
    import tensorflow as tf

    assert not hasattr(tf, 'estimator')
    for path in ROOT.glob('[cet]*/**/*.py'):
        for node in ast.walk(ast.parse(path.read_text())):
            used = [node.attr] if isinstance(node, ast.Attribute) else []
            used += [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            assert not {'estimator', 'contrib'} & {part for name in used for part in name.split('.')}, path


def test_the_door_imports_no_tensorflow_before_the_flags_are_read():
    code = 'import sys, ctl.train; sys.exit("tensorflow" in sys.modules)'
    assert subprocess.run([sys.executable, '-c', code], cwd=ROOT).returncode == 0


def test_the_manifest_for_kubernetes_is_yaml_that_runs_what_there_is():
    yaml = pytest.importorskip('yaml')
    job = yaml.safe_load((ROOT / 'tools' / 'cluster' / 'kubeflow.yaml').read_text())
    worker = job['spec']['tfReplicaSpecs']['Worker']
    (container,) = worker['template']['spec']['containers']
    assert container['name'] == 'tensorflow' and worker['replicas'] == 2
    check_command(container['command'])


SLURM = ROOT / 'tools' / 'cluster' / 'slurm.sbatch'


def test_the_script_for_slurm_runs_what_there_is():
    words = shlex.split(
        re.search(r'(python -m ctl.train .*?[^\\])\n', SLURM.read_text(), re.DOTALL)[1].replace('\\\n', ' ')
    )
    check_command(words)


# Saves, which takes a moment, and ends as a run does.
WORKER = """
import signal, sys, time
def save(number, frame):
    time.sleep(0.5)
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print('up', flush=True)
while True:
    time.sleep(0.1)
"""


def test_a_task_that_slurm_signals_as_a_whole_waits_for_the_worker_that_saves(tmp_path):
    task = re.search(r"bash -c '(.*?)' worker", SLURM.read_text())[1]
    process = subprocess.Popen(
        ['bash', '-c', task, 'worker', sys.executable, '-c', WORKER],
        env={**os.environ, 'codes': str(tmp_path), 'SLURM_PROCID': '3'},
        start_new_session=True,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == b'up\n'
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(timeout=DEADLINE) == 75
    assert (tmp_path / '3').read_text() == '75\n'


# One task a code; python is one that ends with it.
SRUN = """shift  # --kill-on-bad-exit=0
worst=0
SLURM_PROCID=0
for code in $CODES; do
  export SLURM_PROCID=$((SLURM_PROCID + 1))
  CODE=$code "$@" || { ended=$?; [ $ended -gt $worst ] && worst=$ended; }
done
exit $worst
"""


@pytest.mark.parametrize(
    'codes, restarts, again, said',
    [
        ('0 0', 0, False, ''),
        ('75 75', 0, True, ''),
        ('75 75', 99, True, ''),
        ('75 75', 100, False, 'after 100 restarts'),
        ('2 75', 0, False, 'ended with 2 75 : this would come again'),
        ('75 1 75', 0, False, 'this would come again'),
        ('75 3', 0, False, 'this would come again'),
        ('75 137', 0, True, ''),  # a node was lost
        ('13 12', 0, False, ''),
    ],
)
def test_a_slurm_job_is_queued_again_unless_a_worker_ended_for_good(tmp_path, codes, restarts, again, said):
    programs = {'srun': SRUN, 'python': 'exit $CODE', 'scontrol': 'echo "$@" >requeued'}
    for name, text in programs.items():
        (tmp_path / name).write_text(f'#!/bin/bash\n{text}\n')
        (tmp_path / name).chmod(0o755)
    environment = {
        'PATH': f'{tmp_path}:{os.environ["PATH"]}',
        'CODES': codes,
        'SLURM_JOB_ID': '17',
        'SLURM_RESTART_COUNT': str(restarts),
    }
    done = subprocess.run(['bash', str(SLURM)], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == max(map(int, codes.split()))
    assert ((tmp_path / 'requeued').exists() and (tmp_path / 'requeued').read_text() == 'requeue 17\n') == again
    assert said in done.stderr and bool(said) == bool(done.stderr)
    assert not list(tmp_path.glob('exit-codes*'))


def check_command(words):
    """Whether ctl.train knows every flag of a command."""
    from ctl import train

    assert words[:3] == ['python', '-m', 'ctl.train']
    request = train.PROGRAM.parse(words[3:])
    assert request.config.devices.strategy == 'multi_worker'


@pytest.mark.xdist_group('packaging')
def test_tests_of_a_group_share_a_worker_process(request):
    """pytest-xdist writes the group into a test's id, and versions of pytest differ in whether they listen."""
    if request.config.getoption('dist', 'no') != 'loadgroup' and not hasattr(request.config, 'workerinput'):
        pytest.skip('one process')
    assert request.node.nodeid.endswith('@packaging')


@pytest.fixture
def a_folder_with_packages_of_ones_own(tmp_path, monkeypatch):
    """Called as ours are: a repository of somebody's experiments mostly has such."""
    for name in ('tools', 'experiments'):
        (tmp_path / name).mkdir()
        (tmp_path / name / '__init__.py').write_text('raise ImportError("not yours")')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train_here(python, words):
    """A dry run of ctl.train, as started in this folder; what it printed."""
    done = subprocess.run(
        [python, '-m', 'ctl.train', *words, '--dry_run'], capture_output=True, text=True, timeout=DEADLINE
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_it_trains_from_a_folder_that_has_tools_and_experiments_of_its_own(a_folder_with_packages_of_ones_own):
    words = write_data(a_folder_with_packages_of_ones_own)
    assert 'Dry run: the run could start.' in train_here(sys.executable, words)


@pytest.mark.slow
@pytest.mark.parametrize('how', ['editable', 'wheel'])
def test_installed_elsewhere_it_works_from_any_folder(how, a_folder_with_packages_of_ones_own, monkeypatch):
    """An environment of one's own, which here borrows what ours has; the package index gives what builds wheels."""
    folder = a_folder_with_packages_of_ones_own
    monkeypatch.delenv('PYTHONPATH')
    uv = shutil.which('uv') or pytest.skip('uv is not there')
    subprocess.run([uv, 'venv', '--quiet', '--python', sys.executable, 'env'], check=True)
    python = str(folder / 'env' / 'bin' / 'python')
    (site,) = (folder / 'env' / 'lib').glob('python*/site-packages')
    (site / 'borrowed.pth').write_text(str(pathlib.Path(importlib.metadata.distribution('numpy').locate_file(''))))
    words = ['-e', str(ROOT)] if how == 'editable' else [str(ROOT)]
    subprocess.run([uv, 'pip', 'install', '--quiet', '--python', python, '--no-deps', *words], check=True)
    found = subprocess.run(
        [python, '-c', 'import ctl; print(ctl.__file__)'], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert pathlib.Path(found).is_relative_to(ROOT if how == 'editable' else site)
    assert 'Dry run: the run could start.' in train_here(python, write_data(folder))
    tool = pathlib.Path(found).parent.parent / 'tools' / 'make_digits.py'
    assert subprocess.run([python, str(tool), 'digits'], timeout=DEADLINE).returncode == 0
    assert (folder / 'digits' / 'about.json').exists()
