"""A program's command line: its flags, `--help`, what is said of a mistake, the exit code. One way for every program.

`flags.py` builds on it for the programs that take an experiment and its config. Imports no TensorFlow.
"""

import dataclasses
import gc
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

from ctl.commands import command
from ctl.config import nearest
from ctl.errors import UserError, exit_code_of
from ctl.output import lasting, open_missing, print_anything, tidily_ended

HELP = ('--help', '-help', '-h', '--helpfull', '--helpshort')


@dataclasses.dataclass(frozen=True)
class Request:
    """What a command line asks for.

    Attributes:
      own: the values of the program's own flags, by name.
      words: what was given besides flags.
      command: how to start the same again.
    """

    own: dict[str, Any]
    words: tuple[str, ...]
    command: str


def no_flags(values: flags.FlagValues) -> None:
    """`define` of a program without flags."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A program that a person starts.

    Attributes:
      name: as after python -m.
      about: what --help says first, mostly the module's docstring.
      define: defines the program's own flags in a FlagValues.
      words: what it takes besides flags, as usage names it: 'FOLDER'; '' for nothing.
      least, most: how many such words it takes.
      needed: flags that must be given.
      outlives_output: whether it goes on when nothing reads what it prints; others end then.
    """

    name: str
    about: str
    define: Callable[[flags.FlagValues], None] = no_flags
    words: str = ''
    least: int = 0
    most: int | None = 0
    needed: tuple[str, ...] = ()
    outlives_output: bool = False

    def run(self, argv: Sequence[str], body: Callable[[Any], int | None]) -> int:
        """Runs `body` on what a command line, without the program's name, asks for.

        Returns:
          The exit code: of the error that `body` raised, or else what it returned, None for 0.
        """
        codes: list[int | None] = []

        def parse_and_run() -> None:
            if sys.platform == 'win32':
                raise UserError('ctl runs on Linux. On Windows, start it inside WSL2: wsl --install.')
            request = self.parse(list(argv))
            if request is not None:
                codes.append(body(request))

        open_missing()
        print_anything()
        try:
            with lasting() if self.outlives_output else tidily_ended():
                resumes = '; with the same command, a run goes on from its last checkpoint'
                return (
                    exit_code_of(parse_and_run, resumes if self.outlives_output else '')
                    or (codes[0] if codes else None)
                    or 0
                )
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            # A dataset that still reads ahead when Python ends waits for ever for a Python that is gone.
            gc.collect()

    def parse(self, argv: list[str]) -> Request | None:
        """Reads `argv` without the program's name; None when it asked for help, which is printed.

        Raises:
          UserError: for anything in it that is wrong.
        """
        if asks_for_help(argv):
            print(self.help_text())
            return None
        values, words = self.read_flags(argv)
        quiet_tensorflow()
        own = {name: values[name].value for name in values}
        return Request(own, tuple(words), command(self.name, *argv))

    def make_flags(self) -> flags.FlagValues:
        """The program's flags, with their defaults."""
        values = flags.FlagValues()
        self.define(values)
        return values

    def read_flags(self, argv: list[str]) -> tuple[flags.FlagValues, list[str]]:
        """The flags as given, and the words besides them; raises UserError for anything wrong in them."""
        values = self.make_flags()
        try:
            words = values([self.name, *argv])[1:]
        except flags.UnrecognizedFlagError as error:
            names = self._flag_names(values)
            hint = nearest(f'--{error.flagname}', names) if names else 'there are none.'
            usage = f' Usage: {self.usage()}' if self.words else ''
            raise UserError(f'--{error.flagname}: there is no such flag; {hint}{usage}') from None
        except flags.Error as error:
            raise UserError(' '.join(str(error).split())) from None
        missing = [f'--{name}' for name in self.needed if not values[name].value]
        if missing:
            raise UserError(f'{" and ".join(missing)} must be given. Usage: {self.usage()}')
        if not self.words and words:
            raise UserError(f'{words[0]}: flags begin with --. Usage: {self.usage()}')
        if len(words) < self.least or (self.most is not None and len(words) > self.most):
            found = f'{words[self.most]}: is one too many' if len(words) > self.least else f'{self.words} is missing'
            raise UserError(f'{found}. Usage: {self.usage()}')
        return values, words

    def _flag_names(self, values: flags.FlagValues) -> list[str]:
        return [f'--{name}' for name in values]

    def usage(self) -> str:
        """One line: the command with every flag."""
        words = [self.words] if self.words else []
        optional = [f'[--{name}]' for name in self.make_flags() if name not in self.needed]
        return ' '.join([command(self.name), *(f'--{name}={name.upper()}' for name in self.needed), *optional, *words])

    def help_text(self) -> str:
        """What it is, and every flag with its help and default."""
        return '\n'.join([f'usage: {self.usage()}', '', self.about.strip(), *self._flag_lines()])

    def _flag_lines(self) -> list[str]:
        values = self.make_flags()
        width = max((len(name) for name in values), default=0)
        lines = [f'  --{name:<{width}}  {values[name].help}{_default(values[name])}' for name in values]
        return ['', 'flags:', *lines] if lines else []


def _default(flag: flags.Flag) -> str:
    shown = ','.join(flag.default) if isinstance(flag.default, list) else flag.default
    return '' if shown in (None, '', False) else f' [{shown}]'


def asks_for_help(argv: Sequence[str]) -> bool:
    """Whether help is asked for, before any `--`."""
    own = argv[: argv.index('--')] if '--' in argv else argv
    return any(word in HELP for word in own)


def quiet_tensorflow(verbosity: int = -1) -> None:
    """Keeps down what TensorFlow's own code prints, unless `verbosity` is 0 or more; before TensorFlow is imported."""
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3' if verbosity < 0 else '0')


def say_aside(text: str) -> None:
    """Prints on standard error, so that what a program finds out stays alone on standard output."""
    print(text, file=sys.stderr)
