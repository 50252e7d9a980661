"""Commands that a person is told to run: they begin as the person's own did, and work where they are pasted."""

import os
import pathlib
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
    prefix = pathlib.Path(sys.prefix)
    project = prefix.parent
    if 'UV' in os.environ and prefix.name == '.venv' and (project / 'pyproject.toml').is_file():
        here = _project_of(pathlib.Path.cwd())
        elsewhere = [] if here and here.samefile(project) else ['--project', str(project)]
        return ['uv' if shutil.which('uv') else os.environ['UV'], 'run', *elsewhere, 'python']
    found = shutil.which('python')
    return ['python' if found and pathlib.Path(found) == prefix / 'bin' / 'python' else sys.executable]


def _project_of(folder: pathlib.Path) -> pathlib.Path | None:
    """The folder that uv takes for the project of `folder`: the nearest, upwards, with a pyproject.toml."""
    return next((each for each in (folder, *folder.parents) if (each / 'pyproject.toml').is_file()), None)
