"""Steps whose loss or gradient is not finite: the run stops, or goes on as if their batch had taught it nothing."""

import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from ctl.errors import GuardError

# Steps noted one by one between two looks at them; beyond these, the latest takes the place of the last.
MOST_STEPS = 64

_LOOK = 'Look at its records, listed above, and at optimizer.learning_rate, warmup_steps and clip_norm.'


class NonFinite:
    """What is done about them.

    Attributes:
      skip: whether weights and slots are put back to what they were before such a step.
      counts: `nonfinite_steps` so far and `nonfinite_in_a_row`, int64 variables, for the checkpoint.
    """

    def __init__(
        self,
        skip: bool,
        most_in_a_row: int,
        objectives: Sequence[str],
        on_skipped: Callable[[list[int]], None] = lambda steps: None,
    ):
        """In strategy.scope().

        Args:
          most_in_a_row: may be skipped one after the other, and no more.
          objectives: their names, in the order of `guard`'s `each_finite`.
          on_skipped: is told, at every look, the steps skipped since the last.
        """
        self.skip, self._most, self._objectives = skip, most_in_a_row, tuple(objectives)
        self._on_skipped = on_skipped

        def integers(name: str, shape: Sequence[int] = ()) -> tf.Variable:
            return tf.Variable(tf.zeros(shape, tf.int64), trainable=False, name=name)

        self.counts = {name: integers(name) for name in ('nonfinite_steps', 'nonfinite_in_a_row')}
        self._most_seen, self._unseen = integers('most_in_a_row'), integers('since_the_last_look')
        self._noted = integers('noted', [MOST_STEPS, 2])  # step, and number of an objective that was not finite

    def guard(
        self, each_finite: tf.Tensor, step: tf.Tensor, keep_if: Callable[[tf.Tensor], None] | None = None
    ) -> tf.Tensor:
        """After a step, in cross-replica context: notes it, and sees to it that it leaves no trace where it is skipped.

        Args:
          each_finite: whether the loss and gradient of each objective are, bool [objectives].
          keep_if: from `snapshot`, before the step; needed where steps are skipped.

        Returns:
          Whether all are, bool scalar.
        """
        finite = tf.reduce_all(each_finite)
        if self.skip:
            keep_if(finite)
        self._note(finite, step, tf.argmin(tf.cast(each_finite, tf.int32)))
        self._count(finite)
        return finite

    def _note(self, finite: tf.Tensor, step: tf.Tensor, objective: tf.Tensor) -> None:
        """Writes down a step that is not finite, for the next look."""
        place = tf.minimum(self._unseen, MOST_STEPS - 1)
        noted = tf.tensor_scatter_nd_update(self._noted, [[place]], [[step, objective]])
        self._noted.assign(tf.where(finite, self._noted, noted))
        self._unseen.assign_add(tf.cast(~finite, tf.int64))

    def _count(self, finite: tf.Tensor) -> None:
        total, in_a_row = self.counts['nonfinite_steps'], self.counts['nonfinite_in_a_row']
        total.assign_add(tf.cast(~finite, tf.int64))
        in_a_row.assign(tf.where(finite, tf.zeros([], tf.int64), in_a_row + 1))
        self._most_seen.assign(tf.maximum(self._most_seen, in_a_row))

    def look(self, loss: float) -> None:
        """Deals with the steps that were not finite since the last look, outside of TensorFlow's loop.

        Args:
          loss: the sum of the losses since the last report, for the message.

        Raises:
          GuardError: when a step was not finite and is not skipped, or too many were in a row.
        """
        found = int(self._unseen.numpy())
        if not found:
            return
        steps, objectives = self._noted.numpy()[: min(found, MOST_STEPS)].T.tolist()
        if not self.skip:
            raise GuardError(
                f'{self._what(loss, objectives[0])} in step {steps[0]}; nothing was saved after it. {_LOOK}',
                step=steps[0],
            )
        if self._most_seen.numpy() > self._most:
            raise GuardError(
                f'{self._most_seen.numpy()} steps in a row, up to step {steps[-1]}, had a loss or gradient that is not '
                f'finite, more than train.max_nonfinite={self._most}. {_LOOK}',
                step=steps[-1],
            )
        self._unseen.assign(0)
        self._on_skipped(steps)

    def _what(self, loss: float, objective: int) -> str:
        """What was not finite, in words."""
        if len(self._objectives) > 1:
            return f'the loss or gradient of {self._objectives[objective]} is not finite'
        return 'the gradient is not finite' if math.isfinite(loss) else f'the loss became {loss}'


def snapshot(strategy: tf.distribute.Strategy, variables: Sequence[tf.Variable]) -> Callable[[tf.Tensor], None]:
    """Copies variables, each on the devices that have it; in cross-replica context.

    Returns:
      keep_if(finite): puts the copies back unless the bool scalar is true. No device waits for the host to learn which.
    """
    parts = [part for variable in variables for part in strategy.experimental_local_results(variable)]
    copies = []
    for part in parts:
        with tf.device(part.device):
            copies.append(tf.identity(part))

    def keep_if(finite: tf.Tensor) -> None:
        for part, copy in zip(parts, copies, strict=True):
            with tf.device(part.device):
                part.assign(tf.where(finite, part, copy))

    return keep_if
