"""What is saved, where, and how a run finds its way back."""

import json
import os
import pathlib
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from ctl.errors import GuardError, UserError
from ctl.experiment import Experiment

_SUFFIX = '/.ATTRIBUTES/VARIABLE_VALUE'


class Checkpoints:
    """The checkpoints of one run: `checkpoints/ckpt-<step>.*`, readable by tf.train.load_checkpoint.

    Attributes:
      best_folder: `checkpoints/best`, where the one with the best metric is, if one is kept.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        step: tf.Variable,
        experiment: Experiment,
        optimizers: Mapping[str, keras.optimizers.Optimizer],
        sums: Mapping[str, tf.Variable],
        *,
        keep: int,
        in_background: bool = False,
        writes: bool = True,
    ):
        """All that a step changes: weights, slots, the step, the reports' sums.

        Args:
          keep: how many of the newest are kept.
          in_background: whether a save only copies the values, and writes them while training goes on.
          writes: whether this worker's checkpoints stay. All must save, for some variables are read together.

        Raises:
          UserError: when an objective trains a weight that is in none of the experiment's models.
        """
        self._folder, self._keep, self._step = folder, keep, step
        self.best_folder = folder / 'best'
        saved = {id(v) for model in experiment.models.values() for v in model.variables}
        for objective in experiment.objectives:
            lost = [v.path for v in objective.variables if id(v) not in saved]
            if lost:
                raise UserError(
                    f'objective {objective.name}: {", ".join(lost)} would not be saved; add its model to the models.'
                )
        self._tree = {
            'step': step,
            'models': {name: _by_path(model.variables) for name, model in experiment.models.items()},
            'optimizers': {name: _by_path(optimizer.variables) for name, optimizer in optimizers.items()},
            'sums': dict(sums),
        }
        self._copies = None
        self._writing: threading.Thread | None = None
        self._failure: Exception | None = None
        self._in_background, self._writes = in_background, writes

    @property
    def newest(self) -> str | None:
        """The path of the newest checkpoint, or None."""
        return newest_in(self._folder)

    def choose(self, say: Callable[[str], None], touch: bool = True) -> int:
        """The step of the newest sound checkpoint; 0 when there is none.

        A damaged one is named and, with `touch`, set aside in `checkpoints/damaged`.

        Raises:
          UserError: when none is sound.
        """
        damaged = []
        for step in reversed(_steps(self._folder)):
            path = self._folder / f'ckpt-{step}'
            problem = _damage(str(path))
            if problem is None:
                self._say_damaged(damaged, say, touch, then=f'going on from step {step}')
                return step
            damaged.append((path, problem))
        if damaged:
            path, problem = damaged[0]
            raise UserError(
                f'{path} is damaged ({problem}), and there is no sound checkpoint before it. Remove '
                f'{self._folder} to begin again from step 0, or choose another --workdir.'
            )
        return 0

    def restore(self, step: int) -> None:
        """Restores everything from the checkpoint of `step`; 0 is none.

        Raises:
          UserError: when it does not hold exactly what this run has; names what differs.
        """
        if step:
            path = str(self._folder / f'ckpt-{step}')
            self._check_fit(path)
            tf.train.Checkpoint(**self._tree).read(path).assert_existing_objects_matched()

    def _say_damaged(self, damaged: Sequence[tuple[pathlib.Path, str]], say, touch: bool, then: str) -> None:
        for path, problem in damaged:
            aside = self._folder / 'damaged'
            say(f'WARNING: {path} is damaged ({problem}): {"set aside in " + str(aside) if touch else "left"}, {then}.')
            if touch:
                aside.mkdir(exist_ok=True)
                for file in self._folder.glob(f'{path.name}.*'):
                    os.replace(file, aside / file.name)
        if damaged and touch:
            self._list_newest()

    def _check_fit(self, path: str) -> None:
        """Raises UserError, naming weights, unless a checkpoint has all that this run has, and nothing else."""
        found = {
            name.removesuffix(_SUFFIX): shape
            for name, shape in tf.train.load_checkpoint(path).get_variable_to_shape_map().items()
            if name.endswith(_SUFFIX) and not name.startswith('save_counter')
        }
        problem = _difference(found, {name: v.shape.as_list() for name, v in _flatten(self._tree).items()})
        if problem:
            raise UserError(f'{path} does not fit this experiment: {problem}. Choose another --workdir.')

    def load_weights(self, path: str) -> None:
        """Takes the weights of all models, and nothing else, from another run's checkpoint: a warm start.

        Raises:
          UserError: when it is damaged, or a weight is missing or has another shape; names which.
        """
        problem = _damage(path)
        if problem:
            raise UserError(f'train.init_checkpoint={path} is damaged: {problem}.')
        reader = tf.train.load_checkpoint(path)
        variables = {n: v for n, v in _flatten(self._tree).items() if n.startswith('models/')}
        found = {
            name.removesuffix(_SUFFIX): shape
            for name, shape in reader.get_variable_to_shape_map().items()
            if name.removesuffix(_SUFFIX) in variables
        }
        problem = _difference(found, {name: v.shape.as_list() for name, v in variables.items()})
        if problem:
            raise UserError(f'train.init_checkpoint={path} does not fit this experiment: {problem}.')
        for name, variable in variables.items():
            variable.assign(reader.get_tensor(name + _SUFFIX))

    def bytes_needed(self) -> int:
        """Bytes that the checkpoints that are kept, and one more while it is written, take on the disk."""
        one = sum(v.dtype.size * int(np.prod(v.shape)) for v in _flatten(self._tree).values())
        return one * (self._keep + 1)

    def save(self) -> None:
        """Writes a checkpoint of the current step, at once or in the background, and reads it back.

        Raises:
          GuardError: when it, or the one before in the background, cannot be written; the one before is intact.
        """
        step = int(self._step.numpy())
        self.finish()
        if not self._in_background:
            self._write(self._folder, self._tree, step)
            return
        self._copies = self._copies or _map(self._tree, _copy)
        copies = _flatten(self._copies)
        for name, variable in _flatten(self._tree).items():
            copies[name].assign(variable.read_value())

        def write() -> None:
            try:
                self._write(self._folder, self._copies, step)
            except Exception as error:  # whatever it is, finish() raises it
                self._failure = error

        self._writing = threading.Thread(target=write, name='save')
        self._writing.start()

    def finish(self) -> None:
        """Waits until what is written in the background is written; raises GuardError when it could not be."""
        if self._writing:
            self._writing.join()
            self._writing = None
        if self._failure:
            failure, self._failure = self._failure, None
            raise failure

    def read_best(self, metric: str) -> float | None:
        """The best value of a metric that a checkpoint in `best` has; None for none."""
        about = self.best_folder / 'best.json'
        best = json.loads(about.read_text()) if about.exists() else {}
        return best['value'] if best.get('metric') == metric else None

    def save_best(self, metric: str, value: float) -> None:
        """Keeps a checkpoint of the current step in `best`, instead of the one there."""
        step = int(self._step.numpy())
        self._write(self.best_folder, self._tree, step, keep=1)
        if self._writes:
            scratch = self.best_folder / '.best.json'
            scratch.write_text(json.dumps({'step': step, 'metric': metric, 'value': value}) + '\n')
            os.replace(scratch, self.best_folder / 'best.json')

    def _write(self, folder: pathlib.Path, tree: Mapping, step: int, keep: int | None = None) -> None:
        if not self._writes:
            with tempfile.TemporaryDirectory() as scratch:
                tf.train.Checkpoint(**tree).write(f'{scratch}/ckpt')
            return
        path = str(folder / f'ckpt-{step}')
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tf.train.Checkpoint(**tree).write(path)
            problem = _damage(path)
        except (tf.errors.OpError, OSError) as error:
            problem = _first_line(error)
        if problem:
            for file in folder.glob(f'ckpt-{step}.*'):
                file.unlink()
            newest = self.newest
            before = f'{newest} is intact' if newest else 'there is none before it'
            raise GuardError(f'{path} cannot be written: {problem}. Is the disk full? {before}.')
        for old in _steps(folder)[: -(keep or self._keep)]:
            for file in folder.glob(f'ckpt-{old}.*'):
                file.unlink()
        self._list_newest(folder)

    def _list_newest(self, folder: pathlib.Path | None = None) -> None:
        """Writes the file `checkpoint`, by which tf.train.latest_checkpoint finds the newest."""
        folder = folder or self._folder
        paths = [f'ckpt-{step}' for step in _steps(folder)]
        if paths:
            tf.compat.v1.train.update_checkpoint_state(str(folder), paths[-1], paths)

    def clean(self) -> None:
        """Removes what a kill in the middle of a save has left."""
        whole = {f'ckpt-{step}' for step in _steps(self._folder)}
        for path in self._folder.glob('ckpt-*'):
            if path.name.partition('.')[0] not in whole or 'tempstate' in path.name:
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()


def find_checkpoint(text: str) -> str:
    """The checkpoint that a path names: itself, without a suffix, or the newest of a folder or of a run.

    Raises:
      UserError: when there is none.
    """
    path = pathlib.Path(text).expanduser()
    if path.with_name(path.name + '.index').exists():
        return str(path)
    newest = newest_in(path) or newest_in(path / 'checkpoints')
    if newest:
        return newest
    raise UserError(
        f'train.init_checkpoint={text}: no checkpoint is there. Name ckpt-<step>, its folder or a --workdir.'
    )


def newest_in(folder: pathlib.Path) -> str | None:
    """The path of the newest checkpoint in a folder, or None."""
    steps = _steps(folder)
    return str(folder / f'ckpt-{steps[-1]}') if steps else None


def _steps(folder: pathlib.Path) -> list[int]:
    """The steps of the checkpoints in a folder, in order. The .index is written last."""
    return sorted(int(m[1]) for p in folder.glob('ckpt-*.index') if (m := re.fullmatch(r'ckpt-(\d+)\.index', p.name)))


def _damage(path: str) -> str | None:
    """Why a checkpoint cannot be read, every tensor of it; None when it can. The reader checks a checksum of each."""
    try:
        reader = tf.train.load_checkpoint(path)
        for name in reader.get_variable_to_shape_map():
            reader.get_tensor(name)
    except Exception as error:  # IndexError for a file that was cut off, and others
        return _first_line(error)
    return None


def _difference(found: Mapping[str, list[int]], wanted: Mapping[str, list[int]]) -> str:
    """What differs between the variables of a checkpoint and those of a run, by name and shape; '' for nothing."""
    problems = [f'it lacks {name}' for name in wanted if name not in found]
    problems += [
        f'{name} has shape {found[name]} in it, and {shape} here'
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    problems += [f'it has {name}, which is not here' for name in sorted(found) if name not in wanted]
    more = f', and {len(problems) - 2} more differences' if len(problems) > 2 else ''
    return '; '.join(problems[:2]) + more


def _by_path(variables: Sequence[keras.Variable]) -> dict:
    """Variables as nested dicts by the parts of their paths, less the first, which names the model or optimizer.

    tf.train.Checkpoint does not follow the lists of layers in a Keras 3 model: handed the model itself, it would leave
    their weights out, and say nothing when it restores.
    """
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
        if isinstance(value, Mapping):
            flat.update({f'{_escape(key)}/{inner}': leaf for inner, leaf in _flatten(value).items()})
        else:
            flat[_escape(key)] = value
    return flat


def _escape(key: str) -> str:
    """As tf.train.Checkpoint writes the keys of dicts into names."""
    return key.replace('.', '..')


def _map(tree: Mapping, function: Callable) -> dict:
    return {key: _map(v, function) if isinstance(v, Mapping) else function(v) for key, v in tree.items()}


def _copy(variable: tf.Variable) -> tf.Variable:
    with tf.device('/cpu:0'):
        return tf.Variable(variable.read_value(), trainable=False)


def _first_line(error: Exception) -> str:
    text = str(error.args[0] if error.args else error)
    return re.sub(r'\s+', ' ', text).strip()[:300].rstrip('.')
