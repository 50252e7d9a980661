"""All that a step changes, by the names it has in a checkpoint; and whether a checkpoint is sound, and fits.

tf.train.Checkpoint does not follow the lists of layers in a Keras 3 model: handed the model itself, it would leave
their weights out, and say nothing when it restores. So a checkpoint is made of plain dicts, by the variables' paths.
"""

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ctl.errors import UserError
from ctl.experiment import Experiment

_SUFFIX = '/.ATTRIBUTES/VARIABLE_VALUE'


class State:
    """Weights, optimizer slots, the step and the reports' sums of a run.

    Attributes:
      step: int64 variable.
      tree: all variables, as nested dicts.
      variables: the same, flat, by name.
    """

    def __init__(
        self,
        step: tf.Variable,
        experiment: Experiment,
        optimizers: Mapping[str, keras.optimizers.Optimizer],
        sums: Mapping[str, tf.Variable],
    ):
        """Raises UserError when an objective trains a weight that is in none of the experiment's models."""
        saved = {id(v) for model in experiment.models.values() for v in model.variables}
        for objective in experiment.objectives:
            lost = [v.path for v in objective.variables if id(v) not in saved]
            if lost:
                raise UserError(
                    f'objective {objective.name}: {", ".join(lost)} would not be saved; add its model to the models.'
                )
        self.step = step
        self.tree = {
            'step': step,
            'models': {name: _by_path(model.variables) for name, model in experiment.models.items()},
            'optimizers': {name: _by_path(optimizer.variables) for name, optimizer in optimizers.items()},
            'sums': dict(sums),
        }
        self.variables = _flatten(self.tree)

    @property
    def bytes(self) -> int:
        """What a checkpoint of it takes on the disk."""
        return sum(v.dtype.size * int(np.prod(v.shape)) for v in self.variables.values())

    @property
    def read_from_all(self) -> bool:
        """Whether a variable is one that each replica holds for itself: to read it takes all workers."""
        on_read = tf.VariableSynchronization.ON_READ
        return any(getattr(v, 'synchronization', None) == on_read for v in self.variables.values())

    def write(self, path: str) -> None:
        """Writes a checkpoint; raises tf.errors.OpError and OSError."""
        tf.train.Checkpoint(**self.tree).write(path)

    def restore(self, path: str) -> None:
        """Takes everything from a checkpoint.

        Raises:
          UserError: when it does not hold exactly what this run has; names what differs.
        """
        problem = self._difference(_shapes_in(path), self.variables)
        if problem:
            raise UserError(f'{path} does not fit this experiment: {problem}. Choose another --workdir.')
        with plainly_named(path) as name:
            tf.train.Checkpoint(**self.tree).read(name).assert_existing_objects_matched()

    def load_weights(self, path: str) -> None:
        """Takes the weights of all models, and nothing else, from another run's checkpoint: a warm start.

        Raises:
          UserError: when it is damaged, or a weight is missing or has another shape; names which.
        """
        problem = damage(path)
        if problem:
            raise UserError(f'train.init_checkpoint={path} is damaged: {problem}.')
        weights = {name: v for name, v in self.variables.items() if name.startswith('models/')}
        shapes = {name: shape for name, shape in _shapes_in(path).items() if name in weights}
        problem = self._difference(shapes, weights)
        if problem:
            raise UserError(f'train.init_checkpoint={path} does not fit this experiment: {problem}.')
        with _reader(path) as reader:
            for name, variable in weights.items():
                variable.assign(reader.get_tensor(name + _SUFFIX))

    def weights_digest(self) -> str:
        """Of the values of all models' weights, hexadecimal."""
        digest = hashlib.sha256()
        for name in sorted(name for name in self.variables if name.startswith('models/')):
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(self.variables[name].numpy()).tobytes())
        return digest.hexdigest()

    @staticmethod
    def _difference(found: Mapping[str, list[int]], wanted: Mapping[str, tf.Variable]) -> str:
        """What differs between the shapes in a checkpoint and those of a run, by name; '' for nothing."""
        problems = [f'it lacks {name}' for name in wanted if name not in found]
        problems += [
            f'{name} has shape {found[name]} in it, and {variable.shape.as_list()} here'
            for name, variable in wanted.items()
            if name in found and found[name] != variable.shape.as_list()
        ]
        problems += [f'it has {name}, which is not here' for name in sorted(found) if name not in wanted]
        more = f', and {len(problems) - 2} more differences' if len(problems) > 2 else ''
        return '; '.join(problems[:2]) + more


class Copy:
    """A copy of a state in memory, to be written while training goes on."""

    def __init__(self, state: State):
        self._state = state
        self._tree = _map(state.tree, _copy_on_host)
        self._variables = _flatten(self._tree)

    def refresh(self) -> None:
        """Takes the values that the state has now."""
        for name, variable in self._state.variables.items():
            self._variables[name].assign(variable.read_value())

    def write(self, path: str) -> None:
        """As `State.write`."""
        tf.train.Checkpoint(**self._tree).write(path)


def damage(path: str) -> str | None:
    """Why a checkpoint cannot be read, every tensor of it; None when it can. The reader checks a checksum of each."""
    try:
        with _reader(path) as reader:
            for name in reader.get_variable_to_shape_map():
                reader.get_tensor(name)
    except (PermissionError, MemoryError, tf.errors.PermissionDeniedError, tf.errors.ResourceExhaustedError):
        raise  # says nothing of the file
    except tf.errors.UnknownError as error:
        if os.access(f'{path}.index', os.R_OK):
            raise  # of a file system that does not answer, say
        return first_line(error)
    except Exception as error:  # IndexError for a file that was cut off, and others
        return first_line(error)
    return None


def first_line(error: Exception) -> str:
    """What an error says, on one line."""
    text = str(error.args[0] if error.args else error)
    return re.sub(r'\s+', ' ', text).strip()[:300].rstrip('.')


def _shapes_in(path: str) -> dict[str, list[int]]:
    """Name -> shape of every variable in a checkpoint."""
    with _reader(path) as reader:
        return {
            name.removesuffix(_SUFFIX): shape
            for name, shape in reader.get_variable_to_shape_map().items()
            if name.endswith(_SUFFIX) and not name.startswith('save_counter')
        }


@contextlib.contextmanager
def _reader(path: str) -> Iterator[Any]:
    """TensorFlow's reader of a checkpoint, inside the `with`."""
    with plainly_named(path) as name:
        yield tf.train.load_checkpoint(name)


@contextlib.contextmanager
def plainly_named(path: str) -> Iterator[str]:
    """Inside the `with`, the same checkpoint by a name that is no pattern.

    TensorFlow writes to `lr[0.1]/ckpt-5` as it stands, but to read it, looks for what the pattern matches.
    """
    folder, name = os.path.split(path)
    if not re.search(r'[*?\[\]\\]', folder):
        yield path
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f'/proc/self/fd/{handle}/{name}'
    finally:
        os.close(handle)


def _by_path(variables: Sequence[keras.Variable]) -> dict:
    """Variables as nested dicts by the parts of their paths, less the first, which names the model or optimizer."""
    tree: dict = {}
    for variable in variables:
        *folders, name = variable.path.split('/')[1:] or [variable.path]
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        if name in node:
            raise UserError(f'two weights are called {variable.path}: give the layers names of their own.')
        node[name] = variable.value
    return tree


def _flatten(tree: Mapping) -> dict[str, tf.Variable]:
    """The leaves of a tree by the names they have in a checkpoint."""
    flat = {}
    for key, value in tree.items():
        key = key.replace('.', '..')  # as tf.train.Checkpoint writes the keys of dicts into names
        if isinstance(value, Mapping):
            flat.update({f'{key}/{inner}': leaf for inner, leaf in _flatten(value).items()})
        else:
            flat[key] = value
    return flat


def _map(tree: Mapping, function: Callable) -> dict:
    return {key: _map(v, function) if isinstance(v, Mapping) else function(v) for key, v in tree.items()}


def _copy_on_host(variable: tf.Variable) -> tf.Variable:
    with tf.device('/cpu:0'):
        return tf.Variable(variable.read_value(), trainable=False)
