"""What several workers agree on, after an inner loop and in an evaluation; a worker alone agrees with itself."""

import time

import numpy as np
import tensorflow as tf

from ctl.errors import GuardError, Interrupted
from ctl.runtime.cluster import ALONE, Cluster, gather
from ctl.runtime.signals import Stop
from ctl.step import Trainer

# About how long a signal, or a batch that cannot be read, may wait in an evaluation until all workers hear of it.
EVALUATION_SECONDS = 2.0


class Agreement:
    """Whether a worker was asked to end, how long the next inner loop may be, and whether an evaluation has failed.

    What it says is the same on all workers, which must all come to the same calls, in the same order.
    """

    def __init__(self, strategy: tf.distribute.Strategy, workers: Cluster, stop: Stop, trainer: Trainer):
        self._strategy, self._workers, self._stop, self._trainer = strategy, workers, stop, trainer
        self._agreed: str | None = None
        self.begin_evaluation()

    @property
    def alone(self) -> bool:
        return self._workers is ALONE

    @property
    def asked_to_end(self) -> str | None:
        """By what: the same on all workers, which a signal that has come to one of them since is not; None for no."""
        return self._stop.received if self.alone else self._agreed

    def check(self) -> None:
        """Raises Interrupted when the run is to end."""
        if self.asked_to_end:
            raise Interrupted(f'{self.asked_to_end} received')

    def __call__(self, output: dict) -> None:
        """After an inner loop."""
        if self.alone:
            return
        asked, microseconds = gather(self._strategy, [self._stop.asked, int(self._trainer.seconds_per_step * 1e6)]).T
        self._note(asked)
        self._trainer.seconds_per_step = float(microseconds.max()) / 1e6

    def _note(self, asked: np.ndarray) -> None:
        """`asked` [workers]: who has had a signal."""
        if asked.any():
            self._agreed = self._stop.received or f'a signal at {self._workers.name(int(asked.argmax()))}'

    def begin_evaluation(self) -> None:
        """Before its first batch."""
        self._batches, self._until, self._since = 0, 1, time.monotonic()

    def check_batch(self, unread: Exception | None) -> None:
        """After every batch of an evaluation; ends it, for all workers after the same batch, when one has to end.

        They ask each other after the first batch, and then after as many as the slowest of them had in some seconds,
        at most twice as many as before: from what all have said, so that all ask after the same.

        Args:
          unread: why this worker could not read its batches.

        Raises:
          Interrupted: when one was asked to end.
          GuardError: when another could not read.
          Exception: `unread`.
        """
        if self.alone:
            if unread:
                raise unread
            self.check()
            return
        self._batches += 1
        if self._batches < self._until:
            return
        microseconds = int((time.monotonic() - self._since) * 1e6)
        asked, failed, microseconds = gather(self._strategy, [self._stop.asked, unread is not None, microseconds]).T
        if failure := self._first(failed, unread):
            raise failure
        self._note(asked)
        self.check()
        affordable = int(EVALUATION_SECONDS * self._batches / max(microseconds.max() / 1e6, 1e-6))
        self._until = max(1, min(affordable, 2 * self._until))
        self._batches, self._since = 0, time.monotonic()

    def wait_for_all(self) -> None:
        """Until all workers have come here; none leaves while another needs it, or is started again by a launcher."""
        if not self.alone:
            gather(self._strategy, [0])

    def failure(self, mine: Exception | None) -> Exception | None:
        """What went wrong in something that all workers have done: here, or else elsewhere; None for nothing."""
        return mine if self.alone else self._first(gather(self._strategy, [mine is not None])[:, 0], mine)

    def _first(self, failed: np.ndarray, mine: Exception | None) -> Exception | None:
        """Of failures, by worker: one's own, or else that of the first that has one."""
        if mine or not failed.any():
            return mine
        return GuardError(f'the evaluation failed at {self._workers.name(int(failed.argmax()))}, which says why.')
