"""What is saved, where, and how a run finds its way back."""

import os
import pathlib
import re
from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

from ctl.errors import UserError
from ctl.experiment import Experiment


class Checkpoints:
    """The checkpoints of one run: `checkpoints/ckpt-<step>.*`, readable by tf.train.load_checkpoint."""

    def __init__(
        self,
        folder: pathlib.Path,
        keep: int,
        step: tf.Variable,
        experiment: Experiment,
        optimizers: Mapping[str, keras.optimizers.Optimizer],
        sums: Mapping[str, tf.Variable],
    ):
        """`keep` newest are kept; the rest is all that a step changes: weights, slots, the step, the reports' sums.

        Raises:
          UserError: when an objective trains a weight that is in none of the experiment's models.
        """
        self._step = step
        saved = {id(v) for model in experiment.models.values() for v in model.variables}
        for objective in experiment.objectives:
            lost = [v.path for v in objective.variables if id(v) not in saved]
            if lost:
                raise UserError(
                    f'objective {objective.name}: {", ".join(lost)} would not be saved; add its model to the models.'
                )
        checkpoint = tf.train.Checkpoint(
            step=step,
            models={name: _by_path(model.variables) for name, model in experiment.models.items()},
            optimizers={name: _by_path(optimizer.variables) for name, optimizer in optimizers.items()},
            sums=dict(sums),
        )
        self._manager = tf.train.CheckpointManager(checkpoint, str(folder), max_to_keep=keep, checkpoint_name='ckpt')

    @property
    def newest(self) -> str | None:
        """The path of the newest checkpoint, or None."""
        return self._manager.latest_checkpoint

    def restore(self) -> int:
        """Restores everything from the newest checkpoint and returns its step; 0 when there is none.

        Raises:
          UserError: when it cannot be read, or does not hold exactly what this run has; names what differs.
        """
        path = self.newest
        if path is None:
            return 0
        try:
            status = self._manager.checkpoint.restore(path)
            status.assert_consumed()
            status.assert_existing_objects_matched()
        except (AssertionError, ValueError) as error:  # another set of weights, or other shapes
            raise UserError(
                f'{path} does not fit this experiment: {_first_line(error)}. Choose another --workdir.'
            ) from None
        except (tf.errors.OpError, IndexError) as error:
            raise UserError(
                f'{path} cannot be read ({_first_line(error)}). Remove its files and its line in '
                f'{os.path.dirname(path)}/checkpoint, and the run goes on from the one before.'
            ) from None
        return int(self._step.numpy())

    def save(self) -> str:
        """Writes a checkpoint of the current step and returns its path."""
        return self._manager.save(checkpoint_number=int(self._step.numpy()))


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


def _first_line(error: Exception) -> str:
    text = str(error.args[0] if error.args else error)
    return re.sub(r'\s+', ' ', text).strip()[:300].rstrip('.')
