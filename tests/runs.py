"""Runs of the real door, and what they leave behind."""

import dataclasses
import json
import pathlib

import numpy as np
import tensorflow as tf

from ctl import train
from tests import bert_records


def door(*words: str) -> int:
    """`python -m ctl.train` in this process; returns the exit code."""
    return train.main(list(words))


def overrides(**config) -> list[str]:
    return [f'--config.{key.replace("__", ".")}={value}' for key, value in config.items()]


def write_data(folder: pathlib.Path, train_counts=(20, 20, 20, 20), eval_counts=(7, 6)) -> list[str]:
    """Made-up records in `folder`, and the flags of a tiny BERT on them."""
    settings = {
        **bert_records.FITTING,
        'data.train': bert_records.write_files(folder, list(train_counts)),
        'data.eval': bert_records.write_files(folder, list(eval_counts), 'eval', seed=1),
        'train.global_batch_size': 8,
        'optimizer.warmup_steps': 2,
        'log.every': 1,
    }
    return ['--experiment=bert_mlm', *(f'--config.{key}={value}' for key, value in settings.items())]


@dataclasses.dataclass(frozen=True)
class Workdir:
    path: pathlib.Path

    @property
    def metrics(self) -> list[dict]:
        return [json.loads(line) for line in (self.path / 'metrics.jsonl').read_text().splitlines()]

    def lines(self, kind: str) -> list[dict]:
        return [line for line in self.metrics if line['kind'] == kind]

    @property
    def config(self) -> dict:
        return json.loads((self.path / 'config.json').read_text())

    def tensors(self, prefix: str = '') -> dict[str, np.ndarray]:
        """What the newest checkpoint holds, by name."""
        reader = tf.train.load_checkpoint(str(self.path / 'checkpoints'))
        names = reader.get_variable_to_shape_map()
        return {n: reader.get_tensor(n) for n in sorted(names) if n.startswith(prefix) and n[0] != '_'}

    @property
    def weights(self) -> dict[str, np.ndarray]:
        return self.tensors('models/')


def relative_difference(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """Norm of the difference over the norm."""
    assert a.keys() == b.keys()
    difference = sum(float(np.sum((a[k].astype(float) - b[k]) ** 2)) for k in a)
    return float(np.sqrt(difference / sum(float(np.sum(a[k].astype(float) ** 2)) for k in a)))
