"""What TensorBoard shows of a run: the numbers of metrics.jsonl, in a few groups, and the experiment's pictures."""

import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import orbit
import tensorflow as tf

from ctl.files import appears_whole

_SPEED = ('examples', 'examples_per_second')
_SKIPPED = ('skipped_examples', 'damaged_records', 'nonfinite_steps')
_OPTIMIZER = ('gradient_norm', 'learning_rate')


def tag_of(name: str, objectives: Sequence[str]) -> str:
    """The tag of a metric, `group/name`: TensorBoard shows the tags of one group together.

    With several objectives each is a group of its own: `generator_learning_rate` is `generator/learning_rate`.

    Args:
      name: as in metrics.jsonl.
      objectives: the names of the experiment's.
    """
    for objective in objectives:
        if len(objectives) > 1 and name.startswith(f'{objective}_'):
            return f'{objective}/{name.removeprefix(f"{objective}_")}'
    if name in _SPEED:
        return f'speed/{name}'
    if name in _SKIPPED:
        return f'skipped/{name}'
    if name in _OPTIMIZER:
        return f'optimizer/{name}'
    return f'loss/{name}' if name.endswith('loss') else f'metrics/{name}'


class TensorBoard(orbit.utils.SummaryManagerInterface):
    """The event files in `tensorboard/train`, `tensorboard/eval` and `tensorboard/pictures` of the workdir.

    It is Orbit's summary manager of training too, so that what an experiment writes with tf.summary inside the step
    goes to `train`. What Orbit itself would write, under names without groups and after the actions, it does not.
    """

    def __init__(self, workdir: pathlib.Path, objectives: Sequence[str], writes: bool = True):
        """Writes nothing yet. `writes`: whether this worker is the one that does."""
        self._folder, self._objectives, self._writes = workdir / 'tensorboard', tuple(objectives), writes
        self._writers: dict[str, tf.summary.SummaryWriter] = {}

    def drop_after(self, step: int, evaluated: bool = True) -> None:
        """Drops what a killed run wrote after `step`, its last checkpoint: those steps come again.

        Every file is read: its time says little, for a workdir may have been copied.

        Args:
          step: from which the run goes on.
          evaluated: whether the evaluation of `step` is done; else what it wrote comes again too.
        """
        if not self._writes:
            return
        for half in self._folder.glob('*/.events.out.tfevents.*'):  # TensorBoard would show it as a run
            shutil.rmtree(half)
        for path in sorted(self._folder.glob('*/events.out.tfevents.*')):
            last = step if evaluated or path.parent.name == 'train' else step - 1
            if all(stays for _, stays in _read(path, last)):
                continue
            with appears_whole(path) as scratch, tf.io.TFRecordWriter(str(scratch)) as writer:
                for record, stays in _read(path, last):
                    if stays:
                        writer.write(record)

    def scalars(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Writes numbers of kind 'train' or 'eval' by their names in metrics.jsonl."""
        with self.writer(kind).as_default(step=step):
            for name, value in values.items():
                tf.summary.scalar(tag_of(name, self._objectives), value)
        self.writer(kind).flush()

    def pictures(self, step: int, pictures: Mapping[str, np.ndarray]) -> None:
        """Writes pictures, uint8 [height, width, 1 or 3] each, by name."""
        with self.writer('pictures').as_default(step=step):
            for name, picture in pictures.items():
                tf.summary.image(name, picture[None])
        self.writer('pictures').flush()

    def writer(self, kind: str) -> tf.summary.SummaryWriter:
        """Of 'train', 'eval' or 'pictures'."""
        if kind not in self._writers:
            make = tf.summary.create_file_writer if self._writes else lambda folder: tf.summary.create_noop_writer()
            self._writers[kind] = make(str(self._folder / kind))
        return self._writers[kind]

    def summary_writer(self, relative_path: str = '') -> tf.summary.SummaryWriter:
        """Orbit asks for it around an inner loop."""
        return self.writer('train')

    def write_summaries(self, summary_dict: Mapping) -> None:
        """Orbit calls it after an inner loop: the report has been written by then."""

    def flush(self) -> None:
        """Before a checkpoint, and by Orbit after an inner loop, where no signal ended the run before."""
        for writer in self._writers.values():
            writer.flush()


def _read(path: pathlib.Path, last: int) -> Iterator[tuple[bytes, bool]]:
    """Every event of a file, up to where a kill cut it off, and whether it is of step `last` or before.

    So is the first, which says what kind of file it is.
    """
    # Many at a time: a long run has a million.
    for records in tf.data.TFRecordDataset(str(path)).ignore_errors().batch(1024).as_numpy_iterator():
        for record in records:
            event = tf.compat.v1.Event.FromString(record)
            yield record, event.step <= last or event.HasField('file_version')
