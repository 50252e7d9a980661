"""Lists the programs in this folder: `python -m tools`."""

import ast
import pathlib
import sys

from ctl.command_line import Program, Request
from ctl.commands import command

PROGRAM = Program('tools', __doc__)


def main(argv: list[str]) -> int:
    """Runs one command line, without the program's name, and returns the exit code."""
    return PROGRAM.run(argv, list_programs)


def list_programs(request: Request) -> None:
    """Prints the name of every program and the first line of its docstring."""
    there = find_programs()
    width = max(map(len, there))
    print('\n'.join(f'{name:<{width}}  {about}' for name, about in there.items()))
    print(f'\n{command("tools.NAME", "--help")} says more of each.')


def find_programs() -> dict[str, str]:
    """Name -> first line of the docstring of every file that defines a PROGRAM, without importing any."""
    found = {}
    for path in sorted(pathlib.Path(__file__).parent.glob('[!_]*.py')):
        tree = ast.parse(path.read_text(encoding='utf8'))
        assigned = [
            ast.unparse(target) for node in tree.body if isinstance(node, ast.Assign) for target in node.targets
        ]
        if 'PROGRAM' in assigned:
            found[path.stem] = (ast.get_docstring(tree) or '').partition('\n')[0]
    return found


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
