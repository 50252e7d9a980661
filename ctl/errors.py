"""The ways a program ends early, each with its exit code and a message that needs no traceback."""

import errno
import os
import sys
from collections.abc import Callable

# What the machine says of a path that was given wrongly, wherever it is met first.
_WRONG_PATHS = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENOENT,
)


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


class WorkdirGone(WorkdirLost):
    """The workdir was moved or removed; this run has written nothing more, and the same command would begin anew."""

    exit_code = 3


def exit_code_of(program: Callable[[], None], after_ctrl_c: str = '') -> int:
    """Runs a program; 0, or the exit code of the error that ended it, whose message goes to standard error.

    `after_ctrl_c` is how to go on after that.
    """
    try:
        program()
        sys.stdout.flush()
    except (UserError, GuardError) as error:
        print(f'error: {_one_line(str(_as_raised(error)))}', file=sys.stderr)
        return error.exit_code
    except Interrupted as interruption:
        print(_one_line(str(interruption)), file=sys.stderr)
        return interruption.exit_code
    except BrokenPipeError:  # whoever read what is printed has had enough: `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        named = error.filename if isinstance(error.filename, str | os.PathLike) else ''
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            print(f'error: {named or "standard output"} cannot be written: {error.strerror}.', file=sys.stderr)
            if not named:  # Python would try again when it ends
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return GuardError.exit_code
        if not named or error.errno not in _WRONG_PATHS:
            raise
        print(f'error: {_one_line(str(named))}: {error.strerror}.', file=sys.stderr)
        return UserError.exit_code
    except KeyboardInterrupt:
        print(f'stopped by Ctrl-C{after_ctrl_c}.', file=sys.stderr)
        return 130
    return 0


def _one_line(text: str) -> str:
    """The text without what would move a terminal's cursor, whatever was typed or stands in a file's name."""
    return ''.join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def _as_raised(error: BaseException) -> BaseException:
    """The error itself, where TensorFlow has wrapped it into one of the same type with the text of a traceback."""
    while type(error.__context__) is type(error):
        error = error.__context__
    return error
