"""Many small images as one picture."""

import numpy as np

# Small images are drawn larger, up to this height and width.
SHOWN_PIXELS = 48
# The grey between them.
GAP = 96


def grid(images: np.ndarray, columns: int) -> np.ndarray:
    """Images in (-1, 1), float [N, S, S, C] with C 1 or 3, row after row, `columns` in each -> uint8 [H, W, C]."""
    pixels = np.clip(np.round((images + 1) * 127.5), 0, 255).astype(np.uint8)
    times = max(1, SHOWN_PIXELS // images.shape[1])
    pixels = pixels.repeat(times, 1).repeat(times, 2)
    pixels = np.pad(pixels, [(0, 0), (0, 2), (0, 2), (0, 0)], constant_values=GAP)
    rows = len(images) // columns
    N, S, _, C = pixels.shape
    tiled = pixels[: rows * columns].reshape(rows, columns, S, S, C).transpose(0, 2, 1, 3, 4)
    return tiled.reshape(rows * S, columns * S, C)
