"""What is saved, where, and how a run finds its way back."""

import os
import pathlib
import re
from collections.abc import Mapping

import keras
import tensorflow as tf

from ctl.errors import UserError


class Checkpoints:
    """The checkpoints of one run: `checkpoints/ckpt-<step>.*`, readable by tf.train.load_checkpoint."""

    def __init__(
        self,
        folder: pathlib.Path,
        keep: int,
        step: tf.Variable,
        models: Mapping[str, keras.Model],
        optimizers: Mapping[str, keras.optimizers.Optimizer],
        sums: Mapping[str, tf.Variable],
    ):
        """`keep` newest are kept; the rest is all that a step changes: weights, slots, the step, the reports' sums."""
        self._step = step
        checkpoint = tf.train.Checkpoint(
            step=step,
            models=dict(models),
            # The slots alone, in the order the optimizer made them: it tracks the weights as well, and would name them.
            optimizers={name: [v.value for v in optimizer.variables] for name, optimizer in optimizers.items()},
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
        except AssertionError as error:
            raise UserError(
                f'{path} does not fit this experiment: {_first_line(error)}. Choose another --workdir.'
            ) from None
        except (tf.errors.OpError, ValueError, IndexError) as error:
            raise UserError(
                f'{path} cannot be read ({_first_line(error)}). Remove its files and its line in '
                f'{os.path.dirname(path)}/checkpoint, and the run goes on from the one before.'
            ) from None
        return int(self._step.numpy())

    def save(self) -> str:
        """Writes a checkpoint of the current step and returns its path."""
        return self._manager.save(checkpoint_number=int(self._step.numpy()))


def _first_line(error: Exception) -> str:
    text = str(error.args[0] if error.args else error)
    return re.sub(r'\s+', ' ', text).strip()[:300].rstrip('.')
