"""Measures how well records mix, on the worst case, and what it costs: files that are sorted by class.

    python -m tools.bench_shuffle

8 files of 2,000 records of 10 classes, sorted through all files, or within each file. A row is the variance of the
class counts in global batches of 64, over that of a full shuffle (1 is as good), and the records read in a second with
those blocks and windows, the median of three turns.
"""

import pathlib
import statistics
import sys
import tempfile
import time

import numpy as np

from ctl.command_line import Program, Request

FILES, FILE_RECORDS, CLASSES, GLOBAL_BATCH, EPOCHS, TURNS = 8, 2000, 10, 64, 5, 3
# data.block_records and data.window_records; the defaults are among them.
CHOICES = (
    (16, 1024),
    (32, 1024),
    (64, 512),
    (64, 1024),
    (128, 512),
    (128, 1024),
    (128, 2048),
    (256, 1024),
    (256, 2048),
)


def variance_ratio(classes: np.ndarray) -> float:
    """How unevenly classes fall into batches, against a full shuffle.

    Args:
      classes: the class of each record of some batches of one epoch or more, int [batches, batch].

    Returns:
      The variance of a class's count in a batch, averaged over the classes, divided by that of drawing the batch
      without replacement from all records: the hypergeometric n p (1 - p) (N - n) / (N - 1).
    """
    records, part = FILES * FILE_RECORDS, 1 / CLASSES
    counts = np.stack([(classes == c).sum(axis=1) for c in range(CLASSES)], axis=1)
    n = classes.shape[1]
    return float(counts.var(axis=0).mean() / (n * part * (1 - part) * (records - n) / (records - 1)))


def sorted_classes() -> dict[str, np.ndarray]:
    """The class of every record, for both arrangements, int [records]."""
    record = np.arange(FILES * FILE_RECORDS)
    return {
        'through all files': record * CLASSES // len(record),
        'within each file': record % FILE_RECORDS * CLASSES // FILE_RECORDS,
    }


PROGRAM = Program('tools.bench_shuffle', __doc__)


def main(argv: list[str]) -> int:
    """Runs one command line, without the program's name, and returns the exit code."""
    return PROGRAM.run(argv, bench)


def bench(request: Request) -> None:
    """Reads the records with every choice in turn, and prints a row for each."""
    from ctl.runtime import reporting

    reporting.quiet(-1)
    with tempfile.TemporaryDirectory() as folder:
        index = _write_records(pathlib.Path(folder))
        rates = {choice: [] for choice in CHOICES}
        for _ in range(TURNS):
            for choice in CHOICES:
                rates[choice].append(_read(index, *choice))
        print(f'{"block":>6}{"window":>8}' + ''.join(f'{name:>20}' for name in sorted_classes()) + f'{"records/s":>12}')
        for (block, window), read in rates.items():
            records = read[0][0]
            ratios = ''.join(f'{variance_ratio(classes[records]):>20.2f}' for classes in sorted_classes().values())
            print(f'{block:>6}{window:>8}{ratios}{statistics.median(rate for _, rate in read):>12,.0f}')


def _write_records(folder: pathlib.Path):
    """Records of 600 bytes, in the files of the worst case, indexed."""
    import tensorflow as tf

    from ctl.data.index import Index
    from ctl.data.scan import scan

    payload = tf.train.Feature(bytes_list=tf.train.BytesList(value=[bytes(580)]))
    example = tf.train.Example(features=tf.train.Features(feature={'payload': payload})).SerializeToString()
    paths = [str(folder / f'{i}') for i in range(FILES)]
    for path in paths:
        with tf.io.TFRecordWriter(path) as writer:
            for _ in range(FILE_RECORDS):
                writer.write(example)
    return Index(tuple(paths), tuple(scan(path, lambda size: None) for path in paths))


def _read(index, block_records: int, window_records: int) -> tuple[np.ndarray, float]:
    """Record numbers int [batches, 64] of EPOCHS epochs, as the real pipeline gives them, and records a second."""
    import tensorflow as tf

    from ctl.config import base_config
    from ctl.data import pipeline
    from ctl.data.bad_records import BadRecords
    from ctl.data.inputs import make_layout
    from ctl.data.records import make_source
    from ctl.experiment import Experiment, Feature

    config = base_config(
        train=dict(global_batch_size=GLOBAL_BATCH),
        data=dict(block_records=block_records, window_records=window_records),
    )
    source = make_source(index, Experiment({'payload': Feature((), 'string')}, {}, ()), BadRecords(config.data, print))
    layout = make_layout(index, config, FILES, 'file')
    dataset = pipeline.make_train_dataset_fn(source, layout, 0)(tf.distribute.InputContext())
    batches = iter(dataset.map(lambda batch: batch['record']))
    next(batches)
    began = time.perf_counter()
    records = np.stack([next(batches).numpy() for _ in range(EPOCHS * index.records // GLOBAL_BATCH)])
    return records, records.size / (time.perf_counter() - began)


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
