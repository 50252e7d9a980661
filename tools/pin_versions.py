"""Renews the versions that are installed: the constraints in pyproject.toml, and requirements.txt.

    uv run python -m tools.pin_versions

uv finds the newest versions that go together, for every Python and extra that pyproject.toml allows. All of them, with
what tests need, become `constraint-dependencies`, which `uv run` and `uv sync` keep to; what running needs becomes
`requirements.txt`, for pip. uv's own lock file would do the same, but names the hosts that packages came from, and so
stays out of the repository. Afterwards run the tests: what is pinned is to be what was tested.
"""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from ctl.command_line import Program, Request
from ctl.commands import ROOT
from ctl.errors import UserError

PROGRAM = Program('tools.pin_versions', __doc__)
EXPORT = ('export', '--frozen', '--no-hashes', '--no-annotate', '--no-header', '--no-emit-project')
BLOCK = re.compile(r'^constraint-dependencies = \[\n.*?^\]\n', re.DOTALL | re.MULTILINE)


def main(argv: list[str]) -> int:
    """Runs one command line, without the program's name, and returns the exit code."""
    return PROGRAM.run(argv, pin)


def pin(request: Request) -> None:
    """Finds the newest versions and writes both files; raises UserError when uv does not."""
    pyproject = ROOT / 'pyproject.toml'
    if not pyproject.is_file():
        raise UserError(f'{pyproject} is not there: versions are renewed in a clone of the repository.')
    text = pyproject.read_text(encoding='utf8')
    with tempfile.TemporaryDirectory() as folder:
        unpinned = BLOCK.sub('constraint-dependencies = [\n]\n', text)
        pathlib.Path(folder, 'pyproject.toml').write_text(unpinned, encoding='utf8')
        _uv(folder, 'lock')
        everything = _uv(folder, *EXPORT, '--all-extras', '--all-groups')
        running = _uv(folder, *EXPORT, '--no-dev')
    lines = ''.join(f'  "{line}",\n' for line in everything.splitlines())
    pyproject.write_text(BLOCK.sub(lambda _: f'constraint-dependencies = [\n{lines}]\n', text), encoding='utf8')
    (ROOT / 'requirements.txt').write_text(running, encoding='utf8')
    print(f'{len(everything.splitlines())} versions are in pyproject.toml, {len(running.splitlines())} of them in')
    print('requirements.txt. Run the tests now: uv run pytest')


def _uv(folder: str, *words: str) -> str:
    """What `uv` prints in a folder."""
    uv = shutil.which('uv')
    if uv is None:
        raise UserError('uv is not there: pip install uv.')
    done = subprocess.run([uv, *words], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f'uv {words[0]} failed: {" ".join(done.stderr.split())}')
    return done.stdout


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
