"""The command line of a program that takes an experiment: from argv to the experiment, its config and a workdir."""

import contextlib
import dataclasses
import gc
import inspect
import os
import pathlib
import re
import types
from collections.abc import Callable, Sequence
from typing import Any

import ml_collections
from absl import flags
from ml_collections import config_flags

from ctl import config as config_lib
from ctl.command_line import Program, asks_for_help, quiet_tensorflow, say_aside
from ctl.commands import command
from ctl.errors import UserError
from ctl.experiment import list_experiments, load_experiment
from ctl.paths import local_path
from ctl.runtime import workdir as workdir_lib

# Set by a program that starts this one, for the message on how to go on: the command that the person typed.
COMMAND_VARIABLE = 'CTL_COMMAND'
COMMON = ('experiment', 'workdir', 'verbosity')


@dataclasses.dataclass(frozen=True)
class ExperimentRequest:
    """What a command line asks for.

    Attributes:
      name: of the experiment, as for its folder under runs/.
      experiment: as --experiment has it: a name, or the absolute path of a file.
      module: its file, imported.
      config: its config with the overrides in, locked, validated.
      workdir: where the run lives.
      verbosity: absl's; -1 keeps TensorFlow and Orbit quiet.
      own: the values of the program's own flags, by name.
      command: how to start the same again.
      stored: config.json of the run whose config was taken; None where none was.
    """

    name: str
    experiment: str
    module: types.ModuleType
    config: ml_collections.ConfigDict
    workdir: pathlib.Path
    verbosity: int
    own: dict[str, Any]
    command: str
    stored: dict | None


@dataclasses.dataclass(frozen=True)
class ExperimentProgram(Program):
    """A program that takes an experiment and its config; `run`'s body is given a `ExperimentRequest`.

    Attributes:
      only_reads: whether it looks at a run and changes nothing. Then the config is that of the run in --workdir, where
        one is given, and --config flags are as for a later start of it; without --workdir, it is what the flags say.
    """

    only_reads: bool = False

    def run(self, argv: Sequence[str], body: Callable[[ExperimentRequest], int | None]) -> int:
        """As `Program.run`, with TensorFlow and Orbit as quiet as --verbosity says."""

        def quietly(request: ExperimentRequest) -> int | None:
            # Here and not above: the flags have decided by now how much TensorFlow says while it is imported.
            from ctl.runtime import reporting

            if not gc.get_freeze_count():
                # What is imported stays. To look through it for garbage takes about a second each time: when layers'
                # names are reset, at the end, and several times while functions are traced.
                gc.collect()
                gc.freeze()
            reporting.quiet(request.verbosity)
            return body(request)

        return super().run(argv, quietly)

    def parse(self, argv: list[str]) -> ExperimentRequest | None:
        known, overrides = _split(argv)
        if asks_for_help(known):
            quiet_tensorflow()
            print(self.help_text(_experiment_named(known)))
            return None
        values, _ = self.read_flags(known)
        quiet_tensorflow(values.verbosity)
        for name in ('workdir', 'experiment'):
            if values[name].value:
                values[name].value = str(local_path(values[name].value, f'--{name}'))
        run = _Run.in_workdir(values.workdir)
        experiment = self._choose_experiment(values, run)
        name = pathlib.Path(experiment).stem
        workdir = pathlib.Path(values.workdir or pathlib.Path('runs') / name)
        if not self.only_reads:
            run = run or _Run.in_workdir(workdir)
        _check_experiment(experiment, workdir, run)
        module = load_experiment(experiment)
        config = _make_config(module, experiment)
        # A program that trains does what its flags say, unless the workdir alone was named.
        taken = run if self.only_reads or not values.experiment else None
        if taken:
            _take_over(config, taken, chosen=taken.begun or self.only_reads)
        if taken and self.only_reads:
            config.devices.strategy = 'auto'  # whoever looks at a run of several workers is one process
        _apply(config, overrides)
        config_lib.validate(config)
        return ExperimentRequest(
            name=name,
            experiment=str(pathlib.Path(experiment).absolute()) if experiment.endswith('.py') else experiment,
            module=module,
            config=config,
            workdir=workdir,
            verbosity=values.verbosity,
            own={flag: values[flag].value for flag in values if flag not in COMMON},
            command=os.environ.get(COMMAND_VARIABLE) or command(self.name, *argv),
            stored=taken.config if taken and taken.begun else None,
        )

    def _choose_experiment(self, values: flags.FlagValues, run: '_Run | None') -> str:
        """--experiment, or that of the run in --workdir; raises UserError when neither says."""
        if values.workdir and self.only_reads and not run:
            say_aside(f'--workdir={values.workdir}: no run is there yet; what follows is by the flags alone.')
        if values.experiment:
            return values.experiment
        if run and run.note:
            path = pathlib.Path(run.note.experiment)
            if path.is_absolute() and not path.is_file():
                raise UserError(
                    f'--workdir={values.workdir}: the run in it is of {path}, which is not there any more. Say with '
                    '--experiment where that file is.'
                )
            return run.note.experiment
        where = f'--workdir={values.workdir}: ' if values.workdir else ''
        if where:
            where += 'the run in it does not say of which experiment it is: ' if run else 'no run is there: '
        raise UserError(where + self._missing_experiment())

    def _missing_experiment(self) -> str:
        return f'--experiment is missing; there are: {", ".join(list_experiments())}. Usage: {self.usage()}'

    def make_flags(self) -> flags.FlagValues:
        values = flags.FlagValues()
        flags.DEFINE_string(
            'experiment', '', 'a name under experiments/, or the path of your own file', flag_values=values
        )
        flags.DEFINE_string(
            'workdir',
            '',
            'of a run, whose config is taken'
            if self.only_reads
            else 'where the run lives; runs/<experiment> if not given',
            flag_values=values,
        )
        self.define(values)
        flags.DEFINE_integer(
            'verbosity', -1, 'messages of TensorFlow and Orbit: -1 few, 0 info, 1 debug', flag_values=values
        )
        return values

    def _flag_names(self, values: flags.FlagValues) -> list[str]:
        return [*super()._flag_names(values), '--config.KEY']

    def usage(self) -> str:
        own = ' '.join(f'[--{name}]' for name in self.make_flags() if name not in COMMON)
        return f'{command(self.name)} --experiment=NAME [--workdir=DIR] [--config.KEY=VALUE ...] {own}'

    def help_text(self, experiment: str = '') -> str:
        """The flags, the experiments and every config key with default and unit, for one experiment or for all."""
        lines = [super().help_text(), '', 'experiments:']
        lines += [f'  {name:<14} {summary}' for name, summary in list_experiments().items()]
        base = config_lib.flatten(config_lib.base_config())
        lines += ['', 'config keys, as --config.KEY=VALUE (defaults in brackets):', *_key_lines(base)]
        for name in [experiment] if experiment else list_experiments():
            own = config_lib.flatten(_make_config(load_experiment(name), name))
            differing = {key: value for key, value in own.items() if base.get(key) != value or key not in base}
            lines += ['', f'config keys of {name}, and its own defaults:', *_key_lines(differing)]
        return '\n'.join(lines)


def _split(argv: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """The program's own flags, and (key, text) of every --config override."""
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


def _make_config(module: types.ModuleType, experiment: str) -> ml_collections.ConfigDict:
    try:
        config = module.get_config()
    except TypeError as error:
        if inspect.signature(module.get_config).parameters:
            raise UserError(f'--experiment={experiment}: get_config takes no arguments here: {error}.') from None
        raise
    if not isinstance(config, ml_collections.ConfigDict):
        raise UserError(f'--experiment={experiment}: get_config() returned {type(config).__name__}, not a ConfigDict.')
    config.lock()
    return config


@dataclasses.dataclass(frozen=True)
class _Run:
    """A run that a workdir holds.

    Attributes:
      config: its config.json.
      note: what it notes besides, None in workdirs of older versions.
      begun: whether it has trained; if not, nothing binds the next start.
    """

    config: dict
    note: workdir_lib.Note | None
    begun: bool

    @classmethod
    def in_workdir(cls, workdir: str | pathlib.Path) -> '_Run | None':
        """None where no workdir is named, or it has no run."""
        path = pathlib.Path(workdir)
        begun = bool(workdir) and workdir_lib.has_begun(path)
        config = workdir_lib.read_config(path) if workdir else None
        return config and cls(config, workdir_lib.read_note(path), begun)


def _check_experiment(experiment: str, workdir: pathlib.Path, run: _Run | None) -> None:
    """Raises UserError when a workdir has a run of another experiment. A file of one's own may have been moved."""
    if run and run.note and run.begun:
        asked, noted = experiment, run.note.experiment
        both_files = asked.endswith('.py') and noted.endswith('.py')  # then the settings tell
        if asked != noted and not both_files:
            raise UserError(f'--experiment={experiment}: the run in {workdir} is of {noted}. Choose another --workdir.')


def _take_over(config: ml_collections.ConfigDict, run: _Run, chosen: bool) -> None:
    """Puts the values of a run's config.json into `config`; what does not fit there is left for `resume` to name.

    Data that the experiment made itself it finds again, or makes again.

    Args:
      chosen: whether it takes what the start chose by itself, too.
    """
    there = config_lib.flatten(config)
    for key, value in config_lib.flatten(ml_collections.ConfigDict(run.config)).items():
        if key not in there or (run.note and run.note.own_data and key in ('data.train', 'data.eval')):
            continue
        if key in config_lib.AUTOMATIC and not chosen:
            continue
        with contextlib.suppress(TypeError):  # of another type, since the experiment's file has changed
            config_lib.set_value(config, key, tuple(value) if isinstance(there[key], tuple) else value)


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


def _key_lines(flat: dict) -> list[str]:
    lines = []
    for key, value in flat.items():
        rule = config_lib.setting(key)
        choices = f' ({" | ".join(map(str, rule.choices))})' if rule and rule.choices else ''
        lines.append(f'  {key:<28} [{value}] {rule.help if rule else ""}{choices}')
    return lines
