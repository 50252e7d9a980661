"""What the numbers of a report are called, and what an experiment's own may therefore not be called."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ctl.errors import UserError
from ctl.experiment import Experiment, Objective

RESERVED = (
    'step',
    'kind',
    'loss',
    'gradient_norm',
    'learning_rate',
    'examples',
    'examples_per_second',
    'steps',
    'steps_per_second',
    'skipped_examples',
    'damaged_records',
    'nonfinite_steps',
)


class ObjectiveNames(NamedTuple):
    """What the numbers of an objective are called: its value, its gradient's norm, its learning rate."""

    value: str
    norm: str
    learning_rate: str


def names_of(objective: Objective, objectives: Sequence[Objective]) -> ObjectiveNames:
    """Those of one of the experiment's objectives; the value of a single one is the loss."""
    if len(objectives) == 1:
        return ObjectiveNames('loss', 'gradient_norm', 'learning_rate')
    return ObjectiveNames(*(f'{objective.name}_{what}' for what in ('objective', 'gradient_norm', 'learning_rate')))


def check_names(experiment: Experiment, named: Mapping[str, Sequence[str]]) -> None:
    """Raises UserError where two numbers of an evaluation have one name, or one has a name of the report's.

    Args:
      named: who has them, like 'objective generator' -> the names of its numbers.
    """
    objectives = experiment.objectives
    reserved = {*RESERVED, *(name for each in objectives for name in names_of(each, objectives))}
    owners: dict[str, str] = {}
    for owner, names in named.items():
        for name in names:
            if name in reserved:
                raise UserError(
                    f'{owner}: {name} is a name that the report itself uses. Give this number another name, as '
                    f'my_{name}; reserved are {", ".join(sorted(reserved))}.'
                )
            other = owners.setdefault(name, owner)
            if other != owner or list(names).count(name) > 1:
                whose = f'{other} has' if other != owner else 'it has'
                raise UserError(f'{owner}: {whose} another number called {name}. Rename one of the two.')
