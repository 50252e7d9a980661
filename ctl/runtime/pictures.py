"""The pictures that an experiment draws at every evaluation: PNG files in the workdir, and in TensorBoard."""

import pathlib
from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf

from ctl.runtime.tensorboard import TensorBoard


class Pictures:
    """`pictures/<name>-<step>.png`, and the same in TensorBoard."""

    def __init__(
        self, draw: Callable[[], Mapping[str, np.ndarray]] | None, folder: pathlib.Path, tensorboard: TensorBoard
    ):
        """`draw` is the experiment's, None for nothing to draw."""
        self._draw, self._folder, self._tensorboard = draw, folder, tensorboard

    def draw(self, step: int) -> None:
        """Draws the pictures of a step."""
        if self._draw is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        pictures = self._draw()
        for name, picture in pictures.items():
            (self._folder / f'{name}-{step}.png').write_bytes(tf.io.encode_png(picture).numpy())
        self._tensorboard.pictures(step, pictures)
