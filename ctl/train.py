"""The door: `python -m ctl.train --experiment=bert_mlm`. `--help` lists the experiments and every setting.

Exit codes: 0 reached train.steps; 2 the input is wrong; 3 stopped by a guard; 130 stopped by Ctrl-C.
"""

import sys

from ctl import flags
from ctl.errors import GuardError, UserError


def main(argv: list[str]) -> int:
    """Runs one command line, without the program's name, and returns the exit code."""
    try:
        request = flags.parse(argv)
        if request is None:
            return 0
        # Here and not above: the flags have decided by now how much TensorFlow says while it is imported.
        from ctl import loop
        from ctl.runtime import reporting

        reporting.quiet(request.verbosity)
        loop.run(request.name, request.module, request.config, request.workdir, request.dry_run)
        return 0
    except (UserError, GuardError) as error:
        print(f'error: {_as_raised(error)}', file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print('stopped: the same command goes on from the last checkpoint.', file=sys.stderr)
        return 130


def _as_raised(error: Exception) -> Exception:
    """The error itself, where TensorFlow has wrapped it into one of the same type with the text of a traceback."""
    while type(error.__context__) is type(error):
        error = error.__context__
    return error


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
