"""What is installed is what pyproject.toml says, by either way of installing."""

import ast
import importlib.metadata
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).resolve().parent.parent


def read_pyproject():
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # pytest brings it
    return tomllib.loads((ROOT / 'pyproject.toml').read_text())


PYPROJECT = read_pyproject()


def pinned():
    """name -> version, for this Python and platform."""
    lines = (ROOT / 'requirements.txt').read_text().splitlines()
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


def test_requirements_name_no_host_and_no_hash():
    assert not re.search(r'://|--hash|--index|--find', (ROOT / 'requirements.txt').read_text())


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


def test_the_script_for_slurm_is_bash_that_runs_what_there_is():
    path = ROOT / 'tools' / 'cluster' / 'slurm.sbatch'
    subprocess.run(['bash', '-n', str(path)], check=True)
    command = re.search(r'srun (.*?[^\\])\n', path.read_text(), re.DOTALL)[1].replace('\\\n', ' ')
    check_command(shlex.split(command))


def check_command(words):
    """Whether ctl.train knows every flag of a command."""
    from ctl import flags, train

    assert words[:3] == ['python', '-m', 'ctl.train']
    request = flags.parse(words[3:], train.PROGRAM)
    assert request.config.devices.strategy == 'multi_worker'


@pytest.mark.xdist_group('packaging')
def test_tests_of_a_group_share_a_worker_process(request):
    """pytest-xdist writes the group into a test's id, and versions of pytest differ in whether they listen."""
    if request.config.getoption('dist', 'no') != 'loadgroup' and not hasattr(request.config, 'workerinput'):
        pytest.skip('one process')
    assert request.node.nodeid.endswith('@packaging')
