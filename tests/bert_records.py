"""Made-up BERT records: small, valid, and uneven in what they mask."""

import gzip
import pathlib
import zlib

import numpy as np
import tensorflow as tf

from tools.record_files import make_example

VOCAB, LENGTH, PREDICTIONS = 60, 16, 5

# The overrides that fit them, with a model as small as it gets.
FITTING = {
    'model.vocab_size': VOCAB,
    'model.max_length': LENGTH,
    'model.max_predictions': PREDICTIONS,
    'model.layers': 1,
    'model.width': 16,
    'model.heads': 2,
    'model.dropout': 0.0,
}


COMPRESS = {'': bytes, 'GZIP': gzip.compress, 'ZLIB': zlib.compress}


def make_record(rng: np.random.Generator, **changed) -> dict[str, np.ndarray]:
    """One record's features; 1 to 5 of its tokens are masked. `changed` replaces features, or drops them with None."""
    length, masked = int(rng.integers(8, LENGTH + 1)), int(rng.integers(1, PREDICTIONS + 1))
    pad = lambda values, n: np.pad(np.asarray(values), (0, n - len(values)))  # noqa: E731
    record = {
        'input_ids': pad(rng.integers(5, VOCAB, length), LENGTH),
        'input_mask': pad(np.ones(length, int), LENGTH),
        'segment_ids': pad(np.repeat([0, 1], [length // 2, length - length // 2]), LENGTH),
        'masked_lm_positions': pad(rng.choice(length, masked, replace=False), PREDICTIONS),
        'masked_lm_ids': pad(rng.integers(5, VOCAB, masked), PREDICTIONS),
        'masked_lm_weights': pad(np.ones(masked, np.float32), PREDICTIONS),
        'next_sentence_labels': rng.integers(0, 2, 1),
        **changed,
    }
    return {name: value for name, value in record.items() if value is not None}


def write_file(path: pathlib.Path, records: list[dict], compression: str = '') -> None:
    """`compression` is '', 'GZIP' or 'ZLIB'."""
    with tf.io.TFRecordWriter(str(path), compression) as writer:
        for record in records:
            writer.write(make_example(record).SerializeToString())


def write_files(
    folder: pathlib.Path, counts: list[int], split: str = 'train', seed: int = 0, compression: tuple[str, ...] = ('',)
) -> str:
    """Files of `counts` records each, compressed with each of `compression` in turn, and the glob that matches them."""
    rng = np.random.default_rng(seed)
    for i, count in enumerate(counts):
        records = [make_record(rng) for _ in range(count)]
        write_file(folder / f'{split}-{i}.tfrecord', records, compression[i % len(compression)])
    return str(folder / f'{split}-*.tfrecord')
