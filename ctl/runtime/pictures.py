"""The pictures that an experiment draws at every evaluation: PNG files in the workdir, and in TensorBoard."""

import pathlib
from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf


class Pictures:
    """`pictures/<name>-<step>.png`, and the same under `tensorboard/pictures`."""

    def __init__(self, draw: Callable[[], Mapping[str, np.ndarray]] | None, workdir: pathlib.Path, writes: bool = True):
        """`draw` is the experiment's, None for nothing to draw; `writes`: whether this worker is the one that does."""
        self._draw = draw if writes else None
        self._folder, self._tensorboard = workdir / 'pictures', workdir / 'tensorboard' / 'pictures'
        self._summary: tf.summary.SummaryWriter | None = None

    def draw(self, step: int) -> None:
        """Draws the pictures of a step."""
        if self._draw is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        self._summary = self._summary or tf.summary.create_file_writer(str(self._tensorboard))
        for name, picture in self._draw().items():
            (self._folder / f'{name}-{step}.png').write_bytes(tf.io.encode_png(picture).numpy())
            with self._summary.as_default(step=step):
                tf.summary.image(name, picture[None])
        self._summary.flush()
