"""Made-up images as records, and the flags of a tiny GAN on them."""

import pathlib

import numpy as np
import tensorflow as tf

from tests.runs import overrides
from tools import record_files

SIZE, CLASSES = 8, 3


def make_image(rng: np.random.Generator, label: int) -> bytes:
    """Grey, brighter for higher labels."""
    pixels = rng.integers(0, 100, (SIZE, SIZE, 1)) + 60 * label
    return tf.io.encode_png(pixels.astype(np.uint8)).numpy()


def make_images(count: int, seed: int = 0) -> list[dict]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, count)
    return [{'image': make_image(rng, label), 'label': np.array([label])} for label in labels]


def write_data(folder: pathlib.Path, train: int = 80, evaluation: int = 13, **settings) -> list[str]:
    """4 training files and 2 for evaluation in `folder`; the flags of a GAN that trains on them in an instant."""
    record_files.write(folder, 'train', 4, make_images(train))
    record_files.write(folder, 'eval', 2, make_images(evaluation, seed=1))
    flags = {
        'data__train': folder / 'train*',
        'data__eval': folder / 'eval*',
        'model__size': SIZE,
        'model__channels': 1,
        'model__latent': 4,
        'model__generator_width': 4,
        'model__discriminator_width': 4,
        'train__global_batch_size': 8,
        'log__every': 1,
        'eval__at_start': 'false',
        'model__average': 0,
        **settings,
    }
    return ['--experiment=gan_images', *overrides(**flags)]
