"""Makes TFRecords of the 1,797 handwritten digits that scikit-learn ships, and a small classifier of them.

    python -m tools.make_digits [FOLDER]

The classifier's last hidden layer is what distances between real and made digits are measured in. Both are kept in the
cache folder, unless another is named. Of scikit-learn only the data file is read, and nothing imported.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable

import numpy as np

from ctl.command_line import Program, Request
from ctl.commands import ROOT, install
from ctl.errors import UserError
from ctl.experiment import DefaultData
from ctl.files import appears_whole, cache_folder
from ctl.paths import local_path

SIZE, CLASSES = 8, 10
TRAIN_FILES, EVAL_FILES = 4, 2
HELD_OUT = 5  # every 5th digit is for evaluation
HIDDEN = (128, 32)  # units of the classifier's layers; the last are the features
EPOCHS, BATCH = 80, 64
# "Heavy" noise: digits that a person still reads, with effort. Of pixels from 0 to 1.
NOISE = 0.35
MAKER = 2  # raise it when the code below makes other files


def folder(say: Callable[[str], None]) -> pathlib.Path:
    """Where records and classifier are, from the cache or made now, in a process of its own.

    So the one that trains is left as it is: its seeds, the names of its layers, its strategy.

    Raises:
      UserError: without scikit-learn.
    """
    settings = json.dumps([MAKER, _version(), HIDDEN, EPOCHS, BATCH, NOISE, HELD_OUT])
    path = cache_folder() / 'digits' / hashlib.sha256(settings.encode()).hexdigest()[:16]
    if not path.is_dir():
        say(f'Making training data from the digits of scikit-learn {_version()}, and a classifier of them ...')
        # Without GPUs: seconds of work for a CPU, and TensorFlow would take all of their memory.
        own = {'CUDA_VISIBLE_DEVICES': '-1', 'TF_CPP_MIN_LOG_LEVEL': '3', 'TF_CONFIG': ''}
        made = subprocess.run(
            [sys.executable, '-m', 'tools.make_digits', str(path)],
            cwd=ROOT,
            env={**os.environ, **own},
            capture_output=True,
            text=True,
        )
        if made.returncode:
            said = made.stderr.strip().splitlines() or [f'the process ended with {made.returncode}']
            raise UserError(f'the digits cannot be made: {said[-1]}')
    return path


def _version() -> str:
    try:
        return importlib.metadata.version('scikit-learn')
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            'gan_digits takes the digits of scikit-learn, which is not installed: ' + install('scikit-learn')
        ) from None


def default_data(say: Callable[[str], None]) -> DefaultData:
    """The digits as data to train on when none is configured."""
    path = folder(say)
    about = json.loads((path / 'about.json').read_text())
    noisy = 'real digits with heavy pixel noise'
    return DefaultData(
        train=str(path / 'train-*.tfrecord'),
        eval=str(path / 'eval-*.tfrecord'),
        about=f'{about["digits"]:,} handwritten digits of scikit-learn; a classifier of them is right on '
        f'{about["accuracy"]:.1%}',
        references={name: (value, noisy) for name, value in about['noisy'].items()},
    )


def load_extractor(path: pathlib.Path):
    """Digits in (-1, 1), [B, 8, 8, 1] -> the classifier's last hidden layer, float32 [B, 32]."""
    import tensorflow as tf

    weights = dict(np.load(path / 'classifier.npz'))

    def extract(images):
        x = tf.reshape((images + 1) / 2, [-1, SIZE * SIZE])
        for i in range(len(HIDDEN)):
            x = tf.nn.relu(x @ weights[f'kernel_{i}'] + weights[f'bias_{i}'])
        return x

    return extract


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Pixels from 0 to 1, float32 [1797, 8, 8], and what each is, int64 [1797]."""
    package = importlib.util.find_spec('sklearn').submodule_search_locations[0]
    table = np.loadtxt(pathlib.Path(package) / 'datasets' / 'data' / 'digits.csv.gz', delimiter=',')
    return (table[:, :-1].reshape(-1, SIZE, SIZE) / 16).astype(np.float32), table[:, -1].astype(np.int64)


def write(path: pathlib.Path) -> None:
    """Writes records, `classifier.npz` and `about.json` to a folder."""
    from tools import record_files

    pixels, labels = read_digits()
    held_out = np.arange(len(pixels)) % HELD_OUT == HELD_OUT - 1
    path.mkdir(parents=True, exist_ok=True)
    for split, files, chosen in (('train', TRAIN_FILES, ~held_out), ('eval', EVAL_FILES, held_out)):
        instances = [{'pixels': p, 'label': n} for p, n in zip(pixels[chosen], labels[chosen], strict=True)]
        record_files.write(path, split, files, instances)
    record_files.write_index(path)
    accuracy = _train_classifier(path, pixels, labels, held_out)
    about = {'digits': len(pixels), 'accuracy': accuracy, 'noisy': _noisy_distances(path, pixels[held_out])}
    (path / 'about.json').write_text(json.dumps(about, indent=2))


def _train_classifier(path: pathlib.Path, pixels: np.ndarray, labels: np.ndarray, held_out: np.ndarray) -> float:
    """Trains it on what is not held out, and writes it; the part of the held out that it has right."""
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(units, 'relu') for units in HIDDEN]
    model = keras.Sequential(
        [
            keras.Input([SIZE, SIZE]),
            keras.layers.Flatten(),
            *layers,
            keras.layers.Dropout(0.3),
            keras.layers.Dense(CLASSES),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile('adam', loss, metrics=['accuracy'])
    model.fit(pixels[~held_out], labels[~held_out], BATCH, EPOCHS, verbose=0)
    weights = {}
    for i, layer in enumerate(layers):
        weights[f'kernel_{i}'], weights[f'bias_{i}'] = layer.get_weights()
    np.savez(path / 'classifier.npz', **weights)
    return float(model.evaluate(pixels[held_out], labels[held_out], verbose=0)[1])


def _noisy_distances(path: pathlib.Path, pixels: np.ndarray) -> dict[str, float]:
    """How far the same digits are from themselves with noise on their pixels: what a GAN has to beat."""
    from ctl.gan import distances

    noise = np.random.default_rng(0).normal(0, NOISE, pixels.shape)
    noisy = np.clip(pixels + noise, 0, 1).astype(np.float32)
    extract = load_extractor(path)
    real, worse = (extract(2 * each[..., None] - 1).numpy().astype(np.float64) for each in (pixels, noisy))
    return {
        'frechet_distance': distances.frechet_distance(real.mean(0), np.cov(real.T), worse.mean(0), np.cov(worse.T)),
        'kernel_distance': distances.kernel_distance(real, worse),
    }


PROGRAM = Program('tools.make_digits', __doc__, words='[FOLDER]', most=1)


def main(argv: list[str]) -> int:
    """Runs one command line, without the program's name, and returns the exit code."""
    return PROGRAM.run(argv, make)


def make(request: Request) -> None:
    """Makes the folder named, or the one in the cache, and says where it is; raises UserError without scikit-learn."""
    _version()
    if request.words:
        with appears_whole(local_path(request.words[0], 'FOLDER')) as scratch:
            write(scratch)
    else:
        print(folder(print))


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
