"""TFRecord files as our own makers write them: of equal counts, with their index beside them."""

import os
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from ctl.data import tables
from ctl.data.scan import scan


def write(folder: pathlib.Path, split: str, files: int, instances: Sequence[Mapping]) -> None:
    """Deals the instances out to so many files, or to as many as there are; their counts differ by at most one."""
    files = min(files, len(instances))
    for i, path in enumerate(paths(folder, split, files)):
        with tf.io.TFRecordWriter(path) as writer:
            for instance in instances[i::files]:
                writer.write(make_example(instance).SerializeToString())


def paths(folder: pathlib.Path, split: str, files: int) -> list[str]:
    return [str(folder / f'{split}-{i:05d}-of-{files:05d}.tfrecord') for i in range(files)]


def renumber(folder: pathlib.Path, split: str, files: int, records: int) -> None:
    """Where records were dealt out in turn to more `files` than there are of them: removes and renames these."""
    before, after = paths(folder, split, files), paths(folder, split, min(files, records))
    for path in before[len(after) :]:
        os.remove(path)
    for old, new in zip(before, after, strict=False):
        os.replace(old, new)


def write_index(folder: pathlib.Path) -> None:
    """Leaves beside the records of a folder where each of them is."""
    found = sorted(map(str, folder.glob('*.tfrecord')))
    tables.write_beside(str(folder), {path: scan(path, lambda size: None) for path in found})


def make_example(instance: Mapping[str, np.ndarray | bytes]) -> tf.train.Example:
    """A tf.train.Example of arrays and bytes: floats as floats, the rest as integers."""

    def feature(value: np.ndarray | bytes) -> tf.train.Feature:
        if isinstance(value, bytes):
            return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
        if value.dtype.kind == 'f':
            return tf.train.Feature(float_list=tf.train.FloatList(value=value.ravel()))
        return tf.train.Feature(int64_list=tf.train.Int64List(value=value.ravel()))

    return tf.train.Example(features=tf.train.Features(feature={k: feature(v) for k, v in instance.items()}))
