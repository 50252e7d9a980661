"""The door: `python -m ctl.train --experiment=bert_mlm`. `--help` lists the experiments and every setting.

Exit codes: 0 reached train.steps; 2 the input is wrong; 3 stopped by a guard; 130 stopped by Ctrl-C.
"""

import sys

from absl import flags as absl_flags

from ctl import flags
from ctl.errors import exit_code_of


def _define(values: absl_flags.FlagValues) -> None:
    absl_flags.DEFINE_bool('dry_run', False, 'print the plan, check that the run could start, stop', flag_values=values)


PROGRAM = flags.Program('ctl.train', _define)


def main(argv: list[str]) -> int:
    """Runs one command line, without the program's name, and returns the exit code."""
    return exit_code_of(lambda: train(argv))


def train(argv: list[str]) -> None:
    """As `main`, but raises UserError and GuardError."""
    request = flags.parse(argv, PROGRAM)
    if request is None:
        return
    # Here and not above: the flags have decided by now how much TensorFlow says while it is imported.
    from ctl import loop
    from ctl.runtime import reporting

    reporting.quiet(request.verbosity)
    loop.run(request.name, request.module, request.config, request.workdir, request.own['dry_run'])


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
