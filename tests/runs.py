"""Runs of the real door, and what they leave behind."""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import threading
import unittest.mock
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from ctl import train
from ctl.runtime import checkpoints
from tests import bert_records
from tools.launch import free_addresses


def door(*words: str) -> int:
    """`python -m ctl.train` in this process; returns the exit code."""
    return train.main(list(words))


ROOT = pathlib.Path(__file__).resolve().parent.parent


# Seconds that no process that a test waits for may take: ten times what the longest does on a busy machine. It is there
# so that nothing waits for ever, and says nothing about speed.
DEADLINE = 1200


class Stopped(Exception):
    """Where a run was stopped for a test."""


def door_until(step: int, *words: str) -> None:
    """A run that is stopped right after the checkpoint of `step`.

    Fewer steps would not do: the schedule of the learning rate follows train.steps.
    """
    save = checkpoints.Checkpoints.save

    def save_and_stop(self):
        path = save(self)
        if int(self.state.step.numpy()) >= step:
            raise Stopped
        return path

    with unittest.mock.patch.object(checkpoints.Checkpoints, 'save', save_and_stop), contextlib.suppress(Stopped):
        door(*words, f'--config.checkpoint.every={step}')
        raise AssertionError(f'the run did not come to step {step}')


def start_workers(count: int, *words: str, for_the_last: Sequence[str] = ()) -> list[subprocess.Popen]:
    """`python ...` as each of `count` workers that find each other by TF_CONFIG; `finish` ends them.

    `for_the_last` are words that only the last is given. None outlives the deadline.
    """
    cluster = {'worker': free_addresses(count)}
    workers = [
        subprocess.Popen(
            [sys.executable, *words, *(for_the_last if index == count - 1 else ())],
            env={
                **os.environ,
                'TF_CONFIG': json.dumps({'cluster': cluster, 'task': {'type': 'worker', 'index': index}}),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]
    for worker in workers:
        watchdog = threading.Timer(DEADLINE, worker.kill)
        watchdog.daemon = True
        watchdog.start()
    return workers


def finish(workers: list[subprocess.Popen], timeout: float = DEADLINE) -> list[tuple[str, str]]:
    """What each printed on standard output and standard error; none is left running."""
    try:
        return [worker.communicate(timeout=timeout) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


@contextlib.contextmanager
def running(*words: str) -> Iterator[subprocess.Popen]:
    """`python -m ctl.train` in a process of its own, which ends with the `with`, or at the deadline."""
    with subprocess.Popen(
        [sys.executable, '-m', 'ctl.train', *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        watchdog = threading.Timer(DEADLINE, process.kill)
        watchdog.start()
        try:
            yield process
        finally:
            watchdog.cancel()
            process.kill()


def wait_for_step(process: subprocess.Popen, step: int) -> bool:
    """Reads what a run prints until it reports `step` or a later one; whether it did."""
    for line in process.stdout:
        found = re.match(r'step (\d+)/', line)
        if found and int(found[1]) >= step:
            return True
    return False


def paste(line: str, timeout: float = DEADLINE, **how) -> subprocess.CompletedProcess:
    """Runs a line that a person was told to run, in a shell."""
    return subprocess.run(['bash', '-c', line], capture_output=True, text=True, timeout=timeout, **how)


def words_for_the_door(line: str) -> list[str]:
    """What a command that a person was told to run gives to ctl.train."""
    words = shlex.split(line)
    return words[words.index('ctl.train') + 1 :]


def printed_after(words: str, text: str) -> str:
    """The rest of the line that follows `words` in what was printed."""
    assert words in text, text
    return text.partition(words)[2].strip().partition('\n')[0]


def without_rates(lines: list[dict]) -> list[dict]:
    """Lines of metrics.jsonl without what no two runs have in common."""
    return [{k: v for k, v in line.items() if k != 'examples_per_second'} for line in lines]


def overrides(**config) -> list[str]:
    return [f'--config.{key.replace("__", ".")}={value}' for key, value in config.items()]


def write_data(
    folder: pathlib.Path, train_counts=(20, 20, 20, 20), eval_counts=(7, 6), experiment: str = 'bert_mlm'
) -> list[str]:
    """Made-up records in `folder`, and the flags of a tiny BERT on them."""
    settings = {
        **bert_records.FITTING,
        'data.train': bert_records.write_files(folder, list(train_counts)),
        'data.eval': bert_records.write_files(folder, list(eval_counts), 'eval', seed=1),
        'train.global_batch_size': 8,
        'optimizer.warmup_steps': 2,
        'log.every': 1,
    }
    return [f'--experiment={experiment}', *(f'--config.{key}={value}' for key, value in settings.items())]


# The same of bert_mlm with next to no model in it: for tests of the loop.
write_shallow = functools.partial(write_data, experiment=str(ROOT / 'tests' / 'shallow_bert.py'))


def walk(places: Sequence[int]) -> list[int]:
    """A way that goes from every place to every other once and ends where it began (Hierholzer 1873)."""
    left = {a: [b for b in places if b != a] for a in places}
    way, stack = [], [places[0]]
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            way.append(stack.pop())
    return way[::-1]


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
