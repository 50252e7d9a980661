"""The ways a run ends early, each with its exit code and a message that needs no traceback."""


class UserError(Exception):
    """The user's input is wrong (flag, config or data). The message names it and the remedy, in one line."""

    exit_code = 2


class GuardError(Exception):
    """A guard stopped the run (a non-finite loss, say). The message says where, and what to look at."""

    exit_code = 3
