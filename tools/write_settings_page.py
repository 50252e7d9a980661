"""Writes docs/settings.md: every setting with its default, its unit and what it may be, from where the code has them.

    python -m tools.write_settings_page

A test fails while the page is not what this would write.
"""

import itertools
import math
import sys
from collections.abc import Mapping

from ctl import config as config_lib
from ctl.command_line import Program, Request
from ctl.commands import ROOT
from ctl.errors import UserError
from ctl.experiment import list_experiments, load_experiment

PAGE = ROOT / 'docs' / 'settings.md'
HEAD = """\
# Which settings are there?

Every one is set by `--config.SECTION.KEY=VALUE`; a misspelt key, or a value that cannot be, is one line that names it.
`uv run python -m ctl.train --help` prints the same. Durations are in steps. A setting with a `*` may be changed when a
run goes on; any other would make it [another run](run.md#how-does-it-go-on).

This page is written by `uv run python -m tools.write_settings_page`.
"""
ABOUT_OPTIMIZERS = """\
The section `optimizer` is that of the one objective; a GAN has two such sections, `generator` and `discriminator`.
"""
PROGRAM = Program('tools.write_settings_page', __doc__)


def main(argv: list[str]) -> int:
    """Runs one command line, without the program's name, and returns the exit code."""
    return PROGRAM.run(argv, write)


def write(request: Request) -> None:
    """Writes the page; raises UserError where there is no folder for it."""
    if not PAGE.parent.is_dir():
        raise UserError(f'{PAGE.parent} is not there: the page belongs to a clone of the repository.')
    PAGE.write_text(page_text(), encoding='utf8')
    print(f'wrote {PAGE}')


def page_text() -> str:
    """The page: the settings that every experiment has, and what each adds or begins with."""
    shared = [
        *config_lib.OPTIMIZER.values(),
        *itertools.chain(*(section.values() for section in config_lib.BASE.values())),
    ]
    parts = [HEAD, '## Of every experiment\n', ABOUT_OPTIMIZERS, *_tables(config_lib.flatten(config_lib.base_config()))]
    for name, summary in list_experiments().items():
        # Rendered before the next is loaded: two experiments may have a setting of one name.
        config = config_lib.flatten(load_experiment(name).get_config())
        mine = {key: value for key, value in config.items() if config_lib.setting(key) not in shared}
        others = [
            f'`{key}={_shown(value)}`'
            for key, value in config.items()
            if key not in mine and value != config_lib.setting(key).default
        ]
        parts += [f'## Of {name}\n', f'{summary}\n', *_tables(mine), f'Other defaults: {", ".join(others)}.\n']
    return '\n'.join(parts)


def _tables(flat: Mapping[str, config_lib.Value]) -> list[str]:
    """A table for each section."""
    sections: dict[str, list[str]] = {}
    for key, value in flat.items():
        sections.setdefault(key.partition('.')[0], []).append(_row(key, value))
    return [
        '\n'.join([f'| {section} | default | |', '| --- | --- | --- |', *rows, ''])
        for section, rows in sections.items()
    ]


def _row(key: str, value: config_lib.Value) -> str:
    rule = config_lib.setting(key)
    star = '*' if key.startswith(config_lib.CHANGEABLE) else ''
    bounds = []
    if rule.choices:
        *some, last = (f'`{_shown(choice)}`' for choice in rule.choices)
        bounds = [f'{", ".join(some)} or {last}']
    elif not isinstance(value, bool):
        bounds += [f'at least {rule.minimum:g}'] if rule.minimum > -math.inf else []
        bounds += [f'below {rule.below:,}'] if rule.below < math.inf else []
    cells = [f'`{key}`{star}', f'`{_shown(value)}`', '; '.join([rule.help, *bounds])]
    return f'| {" | ".join(cell.replace("|", "&#124;") for cell in cells)} |'


def _shown(value: config_lib.Value) -> str:
    """As it is typed."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if value != '' else "''"


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
