"""Commands that a person is told to run: they begin as the person's own did, and work where they are pasted."""

import os
import pathlib
import re
import shlex
import shutil
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def command(module: str, *words: object) -> str:
    """A line for a shell that starts `module` with the same Python, from the same folder, as this process was started.

    Args:
      module: as after `python -m`.
      *words: what follows it, quoted where a shell needs it.
    """
    program = ROOT / (module.replace('.', '/') + '.py')
    by_path = _started_by_path() and module.startswith('tools.') and program.exists()
    return shlex.join([*_python(), *([str(program)] if by_path else ['-m', module]), *map(str, words)])


def _started_by_path() -> bool:
    """Whether this process was given the path of one of our tools: where `-m tools.name` would find another's."""
    main = sys.modules['__main__']
    path = getattr(main, '__file__', None)
    return getattr(main, '__spec__', None) is None and bool(path) and pathlib.Path(path).resolve().parent.parent == ROOT


def _python() -> list[str]:
    """`uv run python` under uv, with the project where it is another than that of this folder; else the interpreter."""
    prefix = _environment()
    project = prefix.parent
    if 'UV' in os.environ and prefix.name == '.venv' and (project / 'pyproject.toml').is_file():
        here = _project_of(pathlib.Path.cwd())
        elsewhere = [] if here and here.samefile(project) else ['--project', str(project)]
        return ['uv' if shutil.which('uv') else os.environ['UV'], 'run', *elsewhere, 'python']
    found, mine = shutil.which('python'), prefix / 'bin' / 'python'
    if prefix == pathlib.Path(sys.prefix):
        return ['python' if found and pathlib.Path(found) == mine else sys.executable]
    return [str(mine)]


def _environment() -> pathlib.Path:
    """The environment of this Python: beneath the one that `uv run --with` makes, which is gone when this ends."""
    prefix = pathlib.Path(sys.prefix)
    about = prefix / 'pyvenv.cfg'
    text = about.read_text(encoding='utf8') if about.exists() else ''
    beneath = re.search(r'^extends-environment\s*=\s*(.+)$', text, re.MULTILINE)
    return pathlib.Path(beneath[1].strip()) if beneath else prefix


def install(package: str) -> str:
    """A line for a shell that installs a package, without what it depends on, for this Python."""
    if shutil.which('uv'):
        return shlex.join(['uv', 'pip', 'install', '--python', sys.executable, '--no-deps', package])
    return shlex.join([*_python(), '-m', 'pip', 'install', '--no-deps', package])


def _project_of(folder: pathlib.Path) -> pathlib.Path | None:
    """The folder that uv takes for the project of `folder`: the nearest, upwards, with a pyproject.toml."""
    return next((each for each in (folder, *folder.parents) if (each / 'pyproject.toml').is_file()), None)
