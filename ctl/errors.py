"""The ways a program ends early, each with its exit code and a message that needs no traceback."""

import os
import sys
from collections.abc import Callable


class UserError(Exception):
    """The user's input is wrong (flag, config or data). The message names it and the remedy, in one line."""

    exit_code = 2


class GuardError(Exception):
    """A guard stopped the run (a non-finite loss, say). The message says where, and what to look at.

    Attributes:
      step: the number of the step that the guard met, counting from 0, where it was a step.
    """

    exit_code = 3

    def __init__(self, message: str, step: int | None = None):
        super().__init__(message)
        self.step = step


class Interrupted(Exception):
    """The run was asked to end, or a worker it needs is gone; the same command goes on. The message says from where."""

    exit_code = 75


class WorkdirLost(Interrupted):
    """Another run has taken the workdir over; this one has written nothing more."""


def exit_code_of(program: Callable[[], None]) -> int:
    """Runs a program; 0, or the exit code of the error that ended it, whose message goes to standard error."""
    try:
        program()
    except (UserError, GuardError) as error:
        # One line, whatever was typed or stands in a file's name.
        print(f'error: {_as_raised(error)}'.replace('\n', '\\n'), file=sys.stderr)
        return error.exit_code
    except Interrupted as interruption:
        print(interruption, file=sys.stderr)
        return interruption.exit_code
    except BrokenPipeError:  # whoever read what is printed has had enough: `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print('stopped by Ctrl-C; with the same command, a run goes on from its last checkpoint.', file=sys.stderr)
        return 130
    return 0


def _as_raised(error: BaseException) -> BaseException:
    """The error itself, where TensorFlow has wrapped it into one of the same type with the text of a traceback."""
    while type(error.__context__) is type(error):
        error = error.__context__
    return error
