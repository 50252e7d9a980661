"""What an experiment supplies, and how its file is found. The file name is the registry."""

import ast
import dataclasses
import importlib.util
import inspect
import pathlib
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_collections

from ctl.config import nearest
from ctl.errors import UserError

# Feature name -> tf.Tensor [B, ...]; nothing here needs TensorFlow, which takes seconds to import.
Batch = dict[str, Any]

# What ctl puts into every batch, besides features.
BATCH_NAMES = ('record', 'example_weight', 'example_seed', 'evaluation_place')

FOLDER = pathlib.Path(__file__).resolve().parent.parent / 'experiments'


@dataclasses.dataclass(frozen=True)
class Feature:
    """One feature of a tf.train.Example, as the model wants it.

    Attributes:
      shape: shape in one record: () for one number, (128,) for a list of 128.
      dtype: 'int32', 'int64' or 'float32', after parsing; 'string' for bytes; 'image' for a PNG or JPEG of `shape`
        [height, width, 1 or 3], which is decoded to uint8.
      also_called: other names the feature has in the wild; the first record decides.
      below: ids must be in [0, below); None for any.
      shape_setting: the config key that sets the shape, for the remedy in an error.
      shape_choices: what that key can be set to; empty for anything.
      shape_remedy: what to do about a shape that it cannot be set to.
      below_setting: the config key that sets `below`, likewise.
      below_remedy: what to do about an id beyond it.
      missing_remedy: what to do when records do not have the feature.
    """

    shape: tuple[int, ...]
    dtype: str = 'int32'
    also_called: tuple[str, ...] = ()
    below: int | None = None
    shape_setting: str = ''
    shape_choices: tuple[int, ...] = ()
    shape_remedy: str = ''
    below_setting: str = ''
    below_remedy: str = ''
    missing_remedy: str = ''


@dataclasses.dataclass(frozen=True)
class Objective:
    """What one set of variables is trained on. BERT has one; a GAN has two.

    Attributes:
      name: as it appears in logs.
      variables: the trainable Keras variables it owns, and no other objective does; each must get a gradient. What else
        the models of these variables hold, like a batch norm's averages, changes in its updates, and in no other's.
      losses: `losses(batch, seed) -> (losses, metrics)`, two dicts of name -> `ctl.losses.WeightedSum` over the slice
        of the batch it is given. The objective is the sum over `losses` of (global sum / global weight); a weight must
        depend on the batch alone. `batch` has the experiment's features and `example_weight`, float32 [B], 0 for the
        padding of the last evaluation batch and for bad records that are skipped. `seed`, int64 [2], is a function of
        the run's seed, objective, step, update, replica and microbatch alone; None in evaluation. Row i of
        `batch['example_seed']`, int64 [B, 2], is one of the run's seed, objective, step, update and record i alone, on
        any hardware; in evaluation of the record alone. Two records of one update never have the same one, nor do two
        microbatches the same `seed`; otherwise two are equal by accident, one pair in 2^64 (see `ctl.seeds`).
      optimizer: the config section with the settings of `settings.OPTIMIZER`.
      updates: weight updates in one step.
      watched: metrics that training measures and reports too -> what it means when one stays at 0, and at 1.
    """

    name: str
    variables: Sequence[Any]
    losses: Callable[..., tuple[Mapping[str, Any], Mapping[str, Any]]]
    optimizer: ml_collections.ConfigDict
    updates: int = 1
    watched: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Average:
    """A model that follows another: after every step each weight is decay x itself + (1 - decay) x the other's.

    The decay begins smaller, (1 + step) / (10 + step), so that the first weights are soon forgotten.

    Attributes:
      model: the one that follows, with as many weights in the same order; in the experiment's models too.
      of: the one that is trained.
      decay: in [0, 1).
    """

    model: Any
    of: Any
    decay: float


@dataclasses.dataclass(frozen=True)
class Tally:
    """Numbers of an evaluation that no weighted mean can express, like the distance between two distributions.

    Attributes:
      sums: `sums(batch) -> name -> tensor`, of any shape, over the slice of the batch it is given; added up in float64
        over all batches and replicas. What has `example_weight` 0 must not count.
      values: `values(sums) -> name -> float`, from the totals, as NumPy arrays.
      names: of what `values` returns.
    """

    sums: Callable[[Batch], Mapping[str, Any]]
    values: Callable[[Mapping[str, Any]], Mapping[str, float]]
    names: Sequence[str] = ()

    def __post_init__(self):
        """Raises UserError where there are no names: older versions of ctl asked for none."""
        if not self.names:
            raise UserError('tallies: a Tally has no names. Give it those of what its `values` returns.')


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


def unchanged(batch: Batch) -> Batch:
    """`prepare` where there is nothing to prepare."""
    return batch


def call_prepare(prepare: Callable[..., Batch], batch: Batch, seeds: Any, training: bool) -> Batch:
    """What `prepare` makes of a batch, told whichever of `seeds` and `training` its parameters name.

    Raises:
      UserError: where it takes something else, or makes no batch.
    """
    told = {'seeds': seeds, 'training': training}
    try:
        signature = inspect.signature(prepare)
    except (TypeError, ValueError):  # some callables have none
        told = {}
    else:
        told = {name: value for name, value in told.items() if name in signature.parameters}
        try:
            signature.bind(batch, **told)
        except TypeError as error:
            raise UserError(
                f'prepare{signature}: {error}. It is called with a batch, and with `seeds` and `training` where it has '
                'parameters of these names.'
            ) from None
    prepared = prepare(batch, **told)
    if not isinstance(prepared, Mapping):
        raise UserError(f'prepare: returned {type(prepared).__name__}, not a dict of feature name -> tensor.')
    return prepared


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What the loop needs of an experiment, in the order a record meets it.

    Attributes:
      features: feature name -> `Feature`: what is parsed from each record.
      models: name -> Keras model, built; every weight in them is in the checkpoint.
      objectives: trained in this order in every step.
      prepare: batch -> batch in the input pipeline, on parsed features [B, ...]. Where its parameters name them, it is
        given `seeds` and `training` too: row i of `seeds`, int64 [B, 2], is one of the run's seed, the epoch and record
        i alone, in an evaluation of the record alone, and so the same on any hardware and after any restart;
        `training` is whether the batch is to train on.
      averages: models that follow others.
      tallies: more numbers of an evaluation, besides the objectives' losses and metrics.
      pictures: draws, at every evaluation: () -> name -> uint8 [height, width, 1 or 3].
    """

    features: Mapping[str, Feature]
    models: Mapping[str, Any]
    objectives: Sequence[Objective]
    prepare: Callable[..., Batch] = unchanged
    averages: Sequence[Average] = ()
    tallies: Sequence[Tally] = ()
    pictures: Callable[[], Mapping[str, Any]] | None = None

    def __post_init__(self):
        """Raises UserError when two objectives have one name, or own a variable, or a feature has a name of ctl's."""
        for name in BATCH_NAMES:
            if name in self.features:
                raise UserError(
                    f'features: {name} is a name of what ctl puts into every batch: call the feature otherwise, and '
                    f'give {name} in also_called where the records have it.'
                )
        for name, model in self.models.items():
            if not model.built:
                raise UserError(f'models: {name} has no weights yet. Begin it with keras.Input, or call it once.')
        owners: dict[int, Objective] = {}
        for number, objective in enumerate(self.objectives):
            if not objective.variables:
                raise UserError(f'objective {objective.name}: has no variables, so that it would train nothing.')
            if objective.name in [other.name for other in self.objectives[:number]]:
                raise UserError(f'two objectives are called {objective.name}: rename one.')
            for variable in objective.variables:
                owner = owners.setdefault(id(variable), objective)
                if owner is not objective:
                    raise UserError(
                        f'{variable.path} is owned by {owner.name} and by {objective.name}: a variable has one '
                        'objective. Add their losses up in one, or leave it out of one.'
                    )

    def state(self, objective: Objective) -> list[Any]:
        """The variables that are not trained, of every model in which an objective trains some."""
        mine = {id(variable) for variable in objective.variables}
        models = [m for m in self.models.values() if any(id(v) in mine for v in m.trainable_variables)]
        return [variable for model in models for variable in model.non_trainable_variables]

    def rounds(self, order: str) -> list[list[Objective]]:
        """The updates of one step, in order: those of one round take their gradients from the same weights.

        `order` 'sequential': one update a round, all of the first objective's, then the next's. 'joint': a round has an
        update of every objective that has any left, as TF-GAN's joint training steps.
        """
        if order == 'sequential':
            return [[objective] for objective in self.objectives for _ in range(objective.updates)]
        most = max(objective.updates for objective in self.objectives)
        return [[o for o in self.objectives if o.updates > i] for i in range(most)]

    def update_names(self, train: ml_collections.ConfigDict) -> list[str]:
        """The objective of each global batch of a step, with the settings of the `train` section; '' where shared."""
        if not train.fresh_batches:
            return ['']
        return [objective.name for each in self.rounds(train.update_order) for objective in each]


def make_experiment(module: types.ModuleType, config: ml_collections.ConfigDict) -> Experiment:
    """What an experiment's file makes of a config; raises UserError where it is no Experiment."""
    made = module.make_experiment(config)
    if not isinstance(made, Experiment):
        raise UserError(f'{module.__file__}: make_experiment() returned {type(made).__name__}, not a ctl Experiment.')
    return made


def list_experiments() -> dict[str, str]:
    """Name -> first line of the docstring of every file in experiments/, without importing any."""
    return {
        path.stem: (ast.get_docstring(ast.parse(path.read_text(encoding='utf8'))) or '').partition('\n')[0]
        for path in sorted(FOLDER.glob('[!_]*.py'))
    }


def _find_first(folder: pathlib.Path) -> None:
    """Makes imports look in `folder` before anywhere else."""
    if sys.path[:1] != [str(folder)]:
        sys.path.insert(0, str(folder))


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
    # A user's file may import its neighbours, as a script may. One of ours imports `tools`: these, and not those that
    # the folder may have from which the program was started.
    _find_first(FOLDER.parent if path.parent == FOLDER else path.parent.absolute())
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever a user's file raises
        where = error.__traceback__
        while where.tb_next:
            where = where.tb_next
        at, what = f'{where.tb_frame.f_code.co_filename}:{where.tb_lineno}', str(error)
        if isinstance(error, SyntaxError):  # it was raised by Python's compiler
            at, what = f'{error.filename}:{error.lineno}', error.msg
        raise UserError(f'--experiment={name}: importing it failed at {at}: {type(error).__name__}: {what}') from error
    for function in ('get_config', 'make_experiment'):
        if not callable(getattr(module, function, None)):
            raise UserError(f'--experiment={name}: {path} has no function {function}().')
    return module
