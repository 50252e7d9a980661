"""Steps whose loss or gradient is not finite: the run stops, or goes on as if their batch had taught it nothing."""

import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from ctl.errors import GuardError

# Steps remembered one by one between two looks at them; of more, only the number.
MOST_STEPS = 64

_LOOK = 'Look at its records, listed above, and at optimizer.learning_rate, warmup_steps and clip_norm.'


class NonFinite:
    """What is done about them.

    Attributes:
      skip: whether weights and slots are put back to what they were before such a step.
      counts: `nonfinite_steps` so far and `nonfinite_in_a_row`, int64 variables, for the checkpoint.
    """

    def __init__(self, skip: bool, most_in_a_row: int, objectives: Sequence[str] = ('',)):
        """In strategy.scope(). `most_in_a_row` may be skipped one after the other, and no more."""
        self.skip, self._most, self._objectives = skip, most_in_a_row, tuple(objectives)

        def count(name: str, value: int = 0) -> tf.Variable:
            return tf.Variable(value, dtype=tf.int64, trainable=False, name=name)

        self.counts = {name: count(name) for name in ('nonfinite_steps', 'nonfinite_in_a_row')}
        self._most_seen, self._since = count('most_in_a_row'), count('since_the_last_look')
        self._steps = tf.Variable(tf.fill([MOST_STEPS], tf.constant(-1, tf.int64)), trainable=False)
        self._culprits = tf.Variable(tf.fill([MOST_STEPS], tf.constant(0, tf.int64)), trainable=False)

    def guard(self, each_finite: tf.Tensor, step: tf.Tensor, put_back: Callable[[], None]) -> tf.Tensor:
        """After a step, in cross-replica context: counts it, and calls `put_back` when it is to leave no trace.

        Args:
          each_finite: whether the loss and gradient of each objective are, bool [objectives].

        Returns:
          Whether all are, bool scalar.
        """
        finite = tf.reduce_all(each_finite)
        if self.skip:
            tf.cond(finite, lambda: None, put_back)
        not_finite = tf.cast(~finite, tf.int64)
        place = tf.minimum(self._since, MOST_STEPS - 1)
        here = (tf.range(MOST_STEPS, dtype=tf.int64) == place) & ~finite
        self._steps.assign(tf.where(here, step, self._steps))
        self._culprits.assign(tf.where(here, tf.argmin(tf.cast(each_finite, tf.int32)), self._culprits))
        self._since.assign_add(not_finite)
        self.counts['nonfinite_steps'].assign_add(not_finite)
        in_a_row = self.counts['nonfinite_in_a_row']
        in_a_row.assign(tf.where(finite, tf.zeros_like(not_finite), in_a_row + 1))
        self._most_seen.assign(tf.maximum(self._most_seen, in_a_row))
        return finite

    def look(self, loss: float) -> list[int]:
        """The steps that were skipped since the last look, outside of TensorFlow's loop.

        Args:
          loss: the sum of the losses since the last report, for the message.

        Raises:
          GuardError: when a step was not finite and is not skipped, or too many were in a row.
        """
        found = int(self._since.numpy())
        if not found:
            return []
        steps = self._steps.numpy()[: min(found, MOST_STEPS)].tolist()
        if not self.skip:
            what = f'the loss became {loss}' if not math.isfinite(loss) else 'the gradient is not finite'
            if len(self._objectives) > 1:
                what = f'the loss or gradient of {self._objectives[self._culprits.numpy()[0]]} is not finite'
            raise GuardError(f'{what} in step {steps[0]}; nothing was saved after it. {_LOOK}', step=steps[0])
        if self._most_seen.numpy() > self._most:
            raise GuardError(
                f'{self._most_seen.numpy()} steps in a row, up to step {steps[-1]}, had a loss or gradient that is not '
                f'finite, more than train.max_nonfinite={self._most}. {_LOOK}',
                step=steps[-1],
            )
        self._since.assign(0)
        return steps


def snapshot(strategy: tf.distribute.Strategy, variables: Sequence[tf.Variable]) -> Callable[[], None]:
    """Copies variables, on every device that has them; returns what puts the copies back. In cross-replica context."""
    parts = [part for variable in variables for part in strategy.experimental_local_results(variable)]
    copies = [tf.identity(part) for part in parts]

    def put_back() -> None:
        for part, copy in zip(parts, copies, strict=True):
            part.assign(copy)

    return put_back
