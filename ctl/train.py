"""The door: `python -m ctl.train --experiment=bert_mlm`. `--help` lists the experiments and every setting.

Exit codes: 0 reached train.steps; 2 the input is wrong; 3 stopped by a guard; 75 interrupted after saving.
"""

import sys

from absl import flags as absl_flags

from ctl import flags


def _define(values: absl_flags.FlagValues) -> None:
    absl_flags.DEFINE_bool('dry_run', False, 'print the plan, check that the run could start, stop', flag_values=values)
    absl_flags.DEFINE_bool(
        'break_lock',
        False,
        'take the workdir over from another machine as soon as it gives no sign of life',
        flag_values=values,
    )


PROGRAM = flags.ExperimentProgram('ctl.train', __doc__, _define, outlives_output=True)


def main(argv: list[str]) -> int:
    """Runs one command line, without the program's name, and returns the exit code."""
    return PROGRAM.run(argv, train)


def train(request: flags.ExperimentRequest) -> None:
    """Trains what is asked for; raises UserError, GuardError and Interrupted."""
    from ctl import loop, session  # imports TensorFlow

    run = session.Run(
        request.name,
        request.module,
        request.config,
        request.workdir,
        **request.own,
        experiment=request.experiment,
        command=request.command,
    )
    loop.run(run)


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
