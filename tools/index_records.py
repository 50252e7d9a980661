"""Reads TFRecord files once, says how many records each holds and which are damaged, and remembers where they are.

    python -m tools.index_records 'records/train*' [--write]

ctl.train does the same for files it has not seen, and keeps what it found in the cache folder. `--write` puts it beside
the data instead, one hidden file a folder, for every machine that reads them there; a copy keeps it if it keeps the
files' modification times (cp -p, rsync -a). Exit code 3 when records are damaged.
"""

import os
import sys

from absl import flags

from ctl.command_line import Program, Request
from ctl.errors import GuardError
from ctl.paths import find_files

# Damaged records listed; of more, only the number.
MOST_LINES = 20


def _define(values: flags.FlagValues) -> None:
    flags.DEFINE_bool('write', False, 'write the index beside the files', flag_values=values)


PROGRAM = Program('tools.index_records', __doc__, _define, words='FILES', least=1, most=None)


def main(argv: list[str]) -> int:
    """Runs one command line, without the program's name, and returns the exit code."""
    return PROGRAM.run(argv, index)


def index(request: Request) -> None:
    """Does what is asked for.

    Raises:
      UserError: for files that are no TFRecord files.
      GuardError: when records are damaged.
    """
    from ctl.data import tables
    from ctl.data.index import load_index
    from ctl.runtime import reporting

    reporting.quiet(-1)
    found = load_index(find_files(request.words, 'FILES'), reporting.make_console())
    compressed = int(found.sequential.sum())
    print(f'{len(found.files)} files, {found.records:,} records' + (f'; {compressed} compressed' if compressed else ''))
    if request.own['write']:
        contents = dict(zip(found.files, found.contents, strict=True))
        for folder in sorted({os.path.dirname(path) for path in found.files}):
            print(f'wrote {tables.write_beside(folder, contents)}')
    damaged = found.damaged
    for path, each in damaged[:MOST_LINES]:
        print(f'{path}: record {each.number} {each.problem}, {each.size:,} bytes')
    if damaged:
        raise GuardError(f'{len(damaged)} records are damaged, in {len({path for path, _ in damaged})} files.')


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
