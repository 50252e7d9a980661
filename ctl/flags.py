"""The command line: from argv to an experiment, its config and a workdir. Imports no TensorFlow of its own."""

import dataclasses
import gc
import os
import pathlib
import re
import shlex
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

import ml_collections
from absl import flags
from ml_collections import config_flags

from ctl import config as config_lib
from ctl.errors import UserError, exit_code_of
from ctl.experiment import list_experiments, load_experiment


@dataclasses.dataclass(frozen=True)
class Request:
    """What a command line asks for.

    Attributes:
      name: of the experiment, as for its folder under runs/.
      module: its file, imported.
      config: its config with the overrides in, locked, validated.
      workdir: where the run lives.
      verbosity: absl's; -1 keeps TensorFlow and Orbit quiet.
      own: the values of the program's own flags, by name.
      command: what was typed.
    """

    name: str
    module: types.ModuleType
    config: ml_collections.ConfigDict
    workdir: pathlib.Path
    verbosity: int
    own: dict[str, Any]
    command: str


@dataclasses.dataclass(frozen=True)
class Program:
    """A program that takes an experiment and its config.

    Attributes:
      name: as after python -m.
      define: defines the program's own flags in a FlagValues.
    """

    name: str
    define: Callable[[flags.FlagValues], None]

    def run(self, argv: list[str], body: Callable[[Request], None]) -> int:
        """Runs `body` on what a command line, without the program's name, asks for; returns the exit code."""

        def parse_and_run() -> None:
            request = parse(argv, self)
            if request is not None:
                # Here and not above: the flags have decided by now how much TensorFlow says while it is imported.
                from ctl.runtime import reporting

                reporting.quiet(request.verbosity)
                body(request)

        try:
            return exit_code_of(parse_and_run)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            # A dataset that still reads ahead when Python ends waits for ever for a Python that is gone.
            gc.collect()

    def usage(self, values: flags.FlagValues) -> str:
        own = ' '.join(f'[--{name}]' for name in values if name not in COMMON)
        return f'python -m {self.name} --experiment=NAME [--workdir=DIR] [--config.KEY=VALUE ...] {own}'


def say_aside(text: str) -> None:
    """Prints on standard error, so that what a program finds out stays alone on standard output."""
    print(text, file=sys.stderr)


COMMON = ('experiment', 'workdir', 'verbosity')


def parse(argv: list[str], program: Program) -> Request | None:
    """Reads `argv` without the program's name; None when it asked for help, which is printed.

    Raises:
      UserError: for anything in it that is wrong.
    """
    values = _define(program)
    known, overrides = _split(argv)
    if any(word in ('--help', '-help', '-h', '--helpfull') for word in known):
        print(help_text(program, _experiment_named(known)))
        return None
    _parse_flags(values, known, program)
    # TensorFlow reads this when an experiment imports it.
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3' if values.verbosity < 0 else '0')
    if not values.experiment:
        there = ', '.join(list_experiments())
        raise UserError(f'--experiment is missing; there are: {there}. Usage: {program.usage(values)}')
    module = load_experiment(values.experiment)
    name = pathlib.Path(values.experiment).stem
    config = _make_config(module, values.experiment)
    _apply(config, overrides)
    config_lib.validate(config)
    workdir = pathlib.Path(values.workdir or pathlib.Path('runs') / name)
    own = {flag: values[flag].value for flag in values if flag not in COMMON}
    command = shlex.join(['python', '-m', program.name, *argv])
    return Request(name, module, config, workdir, values.verbosity, own, command)


def _define(program: Program) -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_string('experiment', '', 'a name under experiments/, or the path of your own file', flag_values=values)
    flags.DEFINE_string('workdir', '', 'where the run lives; runs/<experiment> if not given', flag_values=values)
    program.define(values)
    flags.DEFINE_integer(
        'verbosity', -1, 'messages of TensorFlow and Orbit: -1 few, 0 info, 1 debug', flag_values=values
    )
    return values


def _split(argv: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """The loop's own flags, and (key, text) of every --config override."""
    known, overrides, words = [], [], iter(argv)
    for word in words:
        match = re.fullmatch(r'--?config\.([^=]+)(?:=(.*))?', word, re.DOTALL)
        negated = re.fullmatch(r'--?noconfig\.([^=]+)', word)
        if negated:
            overrides.append((negated[1], 'false'))
        elif match:
            text = match[2] if match[2] is not None else next(words, None)
            if text is None or (match[2] is None and text.startswith('--')):
                raise UserError(f'{word}: a value is missing; write {word}=VALUE.')
            overrides.append((match[1], text))
        else:
            known.append(word)
    return known, overrides


def _parse_flags(values: flags.FlagValues, words: list[str], program: Program) -> None:
    try:
        rest = values([program.name, *words])[1:]
    except flags.UnrecognizedFlagError as error:
        names = [f'--{name}' for name in values] + ['--config.KEY']
        hint = config_lib.nearest(f'--{error.flagname}', names)
        raise UserError(f'--{error.flagname}: there is no such flag; {hint}') from None
    except flags.Error as error:
        raise UserError(' '.join(str(error).split())) from None
    if rest:
        raise UserError(f'{rest[0]}: flags begin with --. Usage: {program.usage(values)}')


def _make_config(module: types.ModuleType, experiment: str) -> ml_collections.ConfigDict:
    config = module.get_config()
    if not isinstance(config, ml_collections.ConfigDict):
        raise UserError(f'--experiment={experiment}: get_config() returned {type(config).__name__}, not a ConfigDict.')
    config.lock()
    return config


def _apply(config: ml_collections.ConfigDict, overrides: list[tuple[str, str]]) -> None:
    """Puts the overrides into the locked config by way of ml_collections' own flags, after checking each."""
    words = []
    for key, text in overrides:
        default = config_lib.find(config, key)
        if isinstance(default, ml_collections.ConfigDict):
            inner = ', '.join(f'{key}.{name}' for name in default)
            raise UserError(f'--config.{key}: is a section; set one of {inner}.')
        words.append(f'--config.{key}={config_lib.parse_text(key, text, default)}')
    values = flags.FlagValues()
    argv = ['ctl.train', *words]
    try:
        config_flags.DEFINE_config_dict('config', config, lock_config=True, flag_values=values, sys_argv=argv)
        values(argv)
    except (flags.Error, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f'{" ".join(words)}: {" ".join(str(error).split())}') from None


def _experiment_named(words: list[str]) -> str:
    for i, word in enumerate(words):
        match = re.fullmatch(r'--?experiment=(.+)', word)
        if match:
            return match[1]
        if word in ('--experiment', '-experiment') and i + 1 < len(words):
            return words[i + 1]
    return ''


def help_text(program: Program, experiment: str = '') -> str:
    """The flags, the experiments and every config key with its default and unit, for one experiment or for all."""
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
    values = _define(program)
    lines = [f'usage: {program.usage(values)}', '', 'flags:']
    lines += [f'  --{name:<12} {values[name].help}' for name in values]
    lines += ['', 'experiments:']
    lines += [f'  {name:<14} {summary}' for name, summary in list_experiments().items()]
    base = config_lib.flatten(config_lib.base_config())
    lines += ['', 'config keys, as --config.KEY=VALUE (defaults in brackets):', *_key_lines(base)]
    for name in [experiment] if experiment else list_experiments():
        own = config_lib.flatten(_make_config(load_experiment(name), name))
        differing = {key: value for key, value in own.items() if base.get(key) != value or key not in base}
        lines += ['', f'config keys of {name}, and its own defaults:', *_key_lines(differing)]
    return '\n'.join(lines)


def _key_lines(flat: dict) -> list[str]:
    lines = []
    for key, value in flat.items():
        rule = config_lib.setting(key)
        choices = f' ({" | ".join(map(str, rule.choices))})' if rule and rule.choices else ''
        lines.append(f'  {key:<28} [{value}] {rule.help if rule else ""}{choices}')
    return lines
