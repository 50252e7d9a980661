"""Makes TFRecords for gan_images from a folder of images: PNG, JPEG, WebP, GIF, TIFF and what else Pillow opens.

    python -m tools.make_image_records FOLDER --output=records --size=64 [--channels=1] [--skip_bad]

Every image is shrunk or enlarged until its shorter side fits, cut to the square in its middle, and stored as a PNG of
--size by --size pixels, as a viewer shows it: turned as its EXIF says, transparent parts white, the first picture of
an animation. Where all images lie in subfolders, the names of these are the labels: 0 for the first in the order of
the alphabet, and so on; `labels.txt` has them. Every 20th image is held out for evaluation.
"""

import concurrent.futures
import contextlib
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from absl import flags

from ctl.command_line import Program, Request
from ctl.commands import command
from ctl.errors import UserError
from ctl.files import appears_whole
from ctl.gan.images import CHANNELS, SIZES
from ctl.paths import local_path
from tools import image_files

SPLITS = {'train', 'training', 'val', 'valid', 'validation', 'dev', 'test', 'eval'}
TRAIN_FILES, EVAL_FILES = 16, 2
HELD_OUT = 20  # every 20th image is for evaluation
# Images read, decoded and encoded before they are written: what is in memory at once.
CHUNK = 512


def _define(values: flags.FlagValues) -> None:
    flags.DEFINE_string('output', None, 'a new folder for the records', flag_values=values)
    flags.DEFINE_integer('size', 64, 'height and width of the stored images, pixels', flag_values=values)
    flags.DEFINE_integer('channels', 3, '3 for colour, 1 for grey', flag_values=values)
    flags.DEFINE_bool(
        'skip_bad', False, 'leave out files of which no picture can be made, and say which', flag_values=values
    )


PROGRAM = Program('tools.make_image_records', __doc__, _define, words='FOLDER', least=1, most=1, needed=('output',))


def main(argv: list[str]) -> int:
    """Runs one command line, without the program's name, and returns the exit code."""
    return PROGRAM.run(argv, make)


def make(request: Request) -> None:
    """Does what is asked for; raises UserError."""
    size, channels = request.own['size'], request.own['channels']
    if size not in SIZES:
        raise UserError(f'--size={size}: take one of {", ".join(map(str, SIZES))}, which gan_images trains on.')
    if channels not in CHANNELS:
        raise UserError(f'--channels={channels}: take 3 for colour, or 1 for grey.')
    folder, output = local_path(request.words[0], 'FOLDER'), local_path(request.own['output'], '--output')
    if os.path.lexists(output):
        raise UserError(f'--output={output}: is there already. Name a folder that is not.')
    paths = find_images(folder)
    labels = find_labels(folder, paths)
    with appears_whole(output, any_will_do=False) as scratch:
        counts = write_records(paths, labels, scratch, size, channels, request.own['skip_bad'])
    names = sorted(set(labels))
    kinds = f' of {len(names)} classes' if names else ''
    print(f'{counts[0]:,} images for training, {counts[1]:,} for evaluation{kinds}. Train on them with:')
    settings = {
        'data.train': f'{output}/train-*',
        'data.eval': f'{output}/eval-*',
        'model.size': size,
        'model.channels': channels,
        'model.classes': len(names),
    }
    words = [f'--config.{key}={value}' for key, value in settings.items()]
    print(command('ctl.train', '--experiment=gan_images', *words))


def find_images(folder: pathlib.Path, say: Callable[[str], None] = print) -> list[pathlib.Path]:
    """Every image below a folder, sorted; says what was left out; raises UserError when there are too few."""
    found = image_files.find(folder)
    left_out = found.left_out()
    if left_out:
        say(left_out)
    if len(found.images) < HELD_OUT:
        raise UserError(
            f'{folder}: has {len(found.images)} images; it takes {HELD_OUT}, for every {HELD_OUT}th is held out.'
        )
    return found.images


def find_labels(folder: pathlib.Path, paths: Sequence[pathlib.Path]) -> list[str]:
    """The subfolder of each image; empty when all lie in `folder` itself.

    Raises:
      UserError: when some do and some do not.
    """
    inside = [path.relative_to(folder).parts for path in paths]
    alone = [path for path, parts in zip(paths, inside, strict=True) if len(parts) == 1]
    if len(alone) == len(paths):
        return []
    if alone:
        raise UserError(f'{alone[0]}: lies beside subfolders, whose names would be labels. Move it into one of them.')
    labels = [parts[0] for parts in inside]
    splits = set(labels)
    if {name.lower() for name in splits} <= SPLITS:
        raise UserError(
            f'{folder}: {", ".join(sorted(splits))} in it are splits, not classes. Name one: {folder / min(splits)}'
        )
    return labels


def write_records(
    paths: Sequence[pathlib.Path],
    labels: Sequence[str],
    output: pathlib.Path,
    size: int,
    channels: int,
    skip_bad: bool,
    say: Callable[[str], None] = print,
) -> tuple[int, int]:
    """Writes `train-*.tfrecord`, `eval-*.tfrecord` and, with labels, `labels.txt`; how many images are in each.

    Images are mixed before they are written, and held in memory a chunk at a time.
    """
    import tensorflow as tf

    from tools import record_files

    output.mkdir(parents=True, exist_ok=True)
    names = sorted(set(labels))
    if names:
        (output / 'labels.txt').write_text('\n'.join(names) + '\n', encoding='utf8')
    order = np.random.default_rng(0).permutation(len(paths))
    counts = {'train': 0, 'eval': 0}
    with contextlib.ExitStack() as stack:
        files = {
            split: [
                stack.enter_context(tf.io.TFRecordWriter(path)) for path in record_files.paths(output, split, number)
            ]
            for split, number in (('train', TRAIN_FILES), ('eval', EVAL_FILES))
        }
        for number, encoded in encode([paths[i] for i in order], size, channels, skip_bad, say):
            split = 'eval' if sum(counts.values()) % HELD_OUT == HELD_OUT - 1 else 'train'
            instance = {'image': encoded}
            if names:
                instance['label'] = np.array([names.index(labels[order[number]])])
            writer = files[split][counts[split] % len(files[split])]
            writer.write(record_files.make_example(instance).SerializeToString())
            counts[split] += 1
    for split, number in (('train', TRAIN_FILES), ('eval', EVAL_FILES)):
        if not counts[split]:
            raise UserError(
                f'{sum(counts.values())} images are left: it takes {HELD_OUT}, for every {HELD_OUT}th is held out.'
            )
        record_files.renumber(output, split, number, counts[split])
    record_files.write_index(output)
    return counts['train'], counts['eval']


def encode(
    paths: Sequence[pathlib.Path], size: int, channels: int, skip_bad: bool, say: Callable[[str], None]
) -> Iterator[tuple[int, bytes]]:
    """(number, PNG of size x size pixels) of each image, in order, several worked on at once.

    Raises:
      UserError: for a file of which no picture can be made, unless these are skipped.
    """
    import tensorflow as tf

    def encode_one(path: pathlib.Path) -> bytes | image_files.BadImage:
        try:
            pixels = image_files.square(path, size, channels)
        except image_files.BadImage as bad:
            return bad
        return tf.io.encode_png(pixels).numpy()

    with concurrent.futures.ThreadPoolExecutor() as pool:
        for start in range(0, len(paths), CHUNK):
            chunk = paths[start : start + CHUNK]
            for number, encoded in enumerate(pool.map(encode_one, chunk), start):
                if isinstance(encoded, bytes):
                    yield number, encoded
                elif skip_bad:
                    say(f'left out: {paths[number]}: {encoded}.')
                else:
                    raise UserError(f'{paths[number]}: {encoded}. Remove it, or leave such out: --skip_bad.')


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
