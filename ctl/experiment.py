"""What an experiment supplies, and how its file is found. The file name is the registry."""

import ast
import dataclasses
import importlib.util
import pathlib
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_collections

from ctl.config import nearest
from ctl.errors import UserError

FOLDER = pathlib.Path(__file__).resolve().parent.parent / 'experiments'


@dataclasses.dataclass(frozen=True)
class Feature:
    """One feature of a tf.train.Example, as the model wants it.

    Attributes:
      shape: shape in one record: () for one number, (128,) for a list of 128.
      dtype: 'int32', 'int64' or 'float32', after parsing; 'string' for bytes.
      also_called: other names the feature has in the wild; the first record decides.
      below: ids must be in [0, below); None for any.
      shape_setting: the config key that sets the shape, for the remedy in an error.
      below_setting: the config key that sets `below`, likewise.
      below_remedy: what to do about an id beyond it.
      missing_remedy: what to do when records do not have the feature.
    """

    shape: tuple[int, ...]
    dtype: str = 'int32'
    also_called: tuple[str, ...] = ()
    below: int | None = None
    shape_setting: str = ''
    below_setting: str = ''
    below_remedy: str = ''
    missing_remedy: str = ''


@dataclasses.dataclass(frozen=True)
class Objective:
    """What one set of variables is trained on. BERT has one; a GAN has two.

    Attributes:
      name: as it appears in logs.
      variables: the Keras variables it owns; each must get a gradient.
      losses: `losses(batch, seed) -> (losses, metrics)`, two dicts of name -> `ctl.losses.WeightedSum` over the slice
        of the batch it is given. The objective is the sum over `losses` of (global sum / global weight); a weight must
        depend on the batch alone. `batch` has the experiment's features and `example_weight`, float32 [B], 0 for the
        padding of the last evaluation batch and for bad records that are skipped. `seed` is int32 [2], different for
        every step, replica and microbatch; None in evaluation, when nothing is random.
      optimizer: the config section with name, learning_rate, warmup_steps, schedule, weight_decay, clip_norm.
      updates: weight updates in one step.
    """

    name: str
    variables: Sequence[Any]
    losses: Callable[..., tuple[Mapping[str, Any], Mapping[str, Any]]]
    optimizer: ml_collections.ConfigDict
    updates: int = 1


@dataclasses.dataclass(frozen=True)
class DefaultData:
    """Records to train on when none are configured.

    Attributes:
      train: glob of the training files.
      eval: glob of the evaluation files.
      about: one line for the plan: what it is and where it came from.
      references: metric name -> (value, what reaches it): what an evaluation has to beat.
    """

    train: str
    eval: str
    about: str
    references: Mapping[str, tuple[float, str]] = dataclasses.field(default_factory=dict)


def unchanged(batch: dict) -> dict:
    """`prepare` where there is nothing to prepare."""
    return batch


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What the loop needs of an experiment, in the order a record meets it.

    Attributes:
      features: feature name -> `Feature`: what is parsed from each record.
      models: name -> Keras model, built; every weight in them is in the checkpoint.
      objectives: trained in this order in every step.
      prepare: batch -> batch in the input pipeline, on parsed features [B, ...].
    """

    features: Mapping[str, Feature]
    models: Mapping[str, Any]
    objectives: Sequence[Objective]
    prepare: Callable[[dict], dict] = unchanged


def list_experiments() -> dict[str, str]:
    """Name -> first line of the docstring of every file in experiments/, without importing any."""
    return {
        path.stem: (ast.get_docstring(ast.parse(path.read_text(encoding='utf8'))) or '').partition('\n')[0]
        for path in sorted(FOLDER.glob('[!_]*.py'))
    }


def load_experiment(name: str) -> types.ModuleType:
    """Imports an experiment's file: a name under experiments/, or a path to a user's own.

    The module has `get_config()` and `make_experiment(config)`, and may have `make_default_data(config, say)`: called
    when data.train is not set, tells the user what it does with `say(text)`, and returns a `DefaultData`.

    Raises:
      UserError: when there is no such file, with the nearest names; when importing it fails; when it lacks a function.
    """
    path = pathlib.Path(name) if name.endswith('.py') else FOLDER / f'{name}.py'
    if not path.is_file():
        hint = 'there is no such file' if name.endswith('.py') else nearest(name, list_experiments())
        raise UserError(f'--experiment={name}: {hint}')
    spec = importlib.util.spec_from_file_location(f'experiments.{path.stem}', path)
    module = importlib.util.module_from_spec(spec)
    if path.parent != FOLDER and str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # the file may import its neighbours, as a script may
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a user's file raises
        where = error.__traceback__
        while where.tb_next:
            where = where.tb_next
        at = f'{where.tb_frame.f_code.co_filename}:{where.tb_lineno}'
        raise UserError(f'--experiment={name}: importing it failed at {at}: {type(error).__name__}: {error}') from error
    for function in ('get_config', 'make_experiment'):
        if not callable(getattr(module, function, None)):
            raise UserError(f'--experiment={name}: {path} has no function {function}().')
    return module
