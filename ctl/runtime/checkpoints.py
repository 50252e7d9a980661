"""The checkpoints of a run: which there are, which is used, how one more is written, and how long each stays."""

import os
import pathlib
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence

import tensorflow as tf

from ctl.errors import GuardError, UserError
from ctl.files import sync, sync_list
from ctl.paths import local_path
from ctl.runtime.state import Copy, State, damage, first_line


class Checkpoints:
    """The checkpoints of one run: `checkpoints/ckpt-<step>.*`, readable by tf.train.load_checkpoint.

    Attributes:
      state: what is in them.
      best_folder: `checkpoints/best`, where the one with the best metric is, if one is kept.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        state: State,
        most: int,
        *,
        in_background: bool = False,
        writes: bool = True,
        keeps_best: bool = False,
        check: Callable[[], None] = lambda: None,
    ):
        """Looks at nothing yet.

        Args:
          folder: `checkpoints` of the workdir.
          most: how many of the newest stay.
          in_background: whether a save only copies the values, and writes them while training goes on.
          writes: whether this worker's checkpoints stay. All workers must save, and at the same time, for a variable
            that replicas hold each for itself is read from all of them.
          keeps_best: whether one more will stay, in `best`.
          check: called before anything is written or removed; raises when another run has the workdir.
        """
        self.state, self.best_folder = state, folder / 'best'
        self._folder, self._most, self._writes = folder, most, writes
        self._in_background, self._keeps_best, self._check = in_background, keeps_best, check
        self._copy: Copy | None = None
        self._writing: threading.Thread | None = None
        self._failure: Exception | None = None

    @property
    def newest(self) -> str | None:
        """The path of the newest checkpoint, or None."""
        return newest_in(self._folder)

    @property
    def bytes_needed(self) -> int:
        """What the checkpoints that stay, the best among them, and those that are being written, take on the disk."""
        stay = self._most + self._keeps_best
        # In the background one is written while the best may be.
        return self.state.bytes * (stay + (2 if self._keeps_best and self._in_background else 1))

    def choose(self, say: Callable[[str], None], touch: bool = True) -> int:
        """The step of the newest sound checkpoint; 0 when there is none.

        A damaged one is named and, with `touch`, set aside in `checkpoints/damaged`.

        Raises:
          UserError: when none is sound.
        """
        damaged = []
        for step in reversed(steps_in(self._folder)):
            path = self._folder / f'ckpt-{step}'
            problem = damage(str(path))
            if problem is None:
                self._say_damaged(damaged, say, touch, then=f'going on from step {step}')
                return step
            damaged.append((path, problem))
        if damaged:
            path, problem = damaged[0]
            raise UserError(
                f'{path} is damaged ({problem}), and there is no sound checkpoint before it. Remove '
                f'{self._folder} to begin again from step 0, or choose another --workdir.'
            )
        return 0

    def _say_damaged(self, damaged: Sequence[tuple[pathlib.Path, str]], say, touch: bool, then: str) -> None:
        for path, problem in damaged:
            aside = self._folder / 'damaged'
            say(f'WARNING: {path} is damaged ({problem}): {"set aside in " + str(aside) if touch else "left"}, {then}.')
            if touch:
                aside.mkdir(exist_ok=True)
                for file in self._folder.glob(f'{path.name}.*'):
                    os.replace(file, aside / file.name)
        if damaged and touch:
            _list_newest(self._folder)

    def restore(self, step: int) -> None:
        """Restores everything from the checkpoint of `step`; 0 is none. Raises UserError as `State.restore`."""
        if step:
            self.state.restore(str(self._folder / f'ckpt-{step}'))

    def save(self) -> None:
        """Writes a checkpoint of the current step, at once or in the background, and reads it back.

        Raises:
          GuardError: when it, or the one before in the background, cannot be written; the one before is intact.
        """
        step = int(self.state.step.numpy())
        self.finish()
        if not self._in_background:
            self._write(self._folder, self.state, step, self._most)
            return
        self._copy = self._copy or Copy(self.state)
        self._copy.refresh()

        def write() -> None:
            try:
                self._write(self._folder, self._copy, step, self._most)
            except Exception as error:  # whatever it is, finish() raises it
                self._failure = error

        self._writing = threading.Thread(target=write, name='save')
        self._writing.start()

    def finish(self) -> None:
        """Waits until what is written in the background is written; raises GuardError when it could not be."""
        if self._writing:
            self._writing.join()
            self._writing = None
        if self._failure:
            failure, self._failure = self._failure, None
            raise failure

    def abandon(self, say: Callable[[str], None]) -> None:
        """Where the run ends by an error: waits as `finish` does, and only says what could not be written."""
        try:
            self.finish()
        except Exception as failure:
            say(f'WARNING: the checkpoint that was being written is lost: {failure}')

    def write_best(self) -> int:
        """Puts a checkpoint of the current step into `best`, beside what is there; returns the step."""
        step = int(self.state.step.numpy())
        self._write(self.best_folder, self.state, step, most=None)
        return step

    def _write(self, folder: pathlib.Path, source: State | Copy, step: int, most: int | None) -> None:
        """Writes a checkpoint into a folder, reads it back, and removes those beyond the newest `most` there."""
        if not self._writes:
            if not self.state.read_from_all:
                return
            with tempfile.TemporaryDirectory() as scratch:
                source.write(f'{scratch}/ckpt')
            return
        self._check()
        path = str(folder / f'ckpt-{step}')
        try:
            folder.mkdir(parents=True, exist_ok=True)
            source.write(path)
            for file in folder.glob(f'ckpt-{step}.*'):
                sync(file)
            sync_list(folder)  # before an older one goes: there may be no other
            problem = damage(path)
        except (tf.errors.OpError, OSError) as error:
            problem = first_line(error)
        if problem:
            _remove(folder, step)
            newest = self.newest
            before = f'{newest} is intact' if newest else 'there is none before it'
            raise GuardError(f'{path} cannot be written: {problem}. Is the disk full? {before}.')
        self._check()  # it may have taken long
        for old in steps_in(folder)[:-most] if most else ():
            _remove(folder, old)
        _list_newest(folder)

    def clean(self) -> None:
        """Removes what a kill in the middle of a save has left."""
        whole = {f'ckpt-{step}' for step in steps_in(self._folder)}
        for path in self._folder.glob('ckpt-*'):
            if path.name.partition('.')[0] not in whole or 'tempstate' in path.name:
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()


def find_checkpoint(text: str) -> str:
    """The checkpoint that a path names: itself, without a suffix, or the newest of a folder or of a run.

    Raises:
      UserError: when there is none.
    """
    path = local_path(text, 'train.init_checkpoint')
    if path.name and path.with_name(path.name + '.index').exists():
        return str(path)
    newest = newest_in(path) or newest_in(path / 'checkpoints')
    if newest:
        return newest
    raise UserError(
        f'train.init_checkpoint={text}: no checkpoint is there. Name ckpt-<step>, its folder or a --workdir.'
    )


def newest_in(folder: pathlib.Path) -> str | None:
    """The path of the newest checkpoint in a folder, or None."""
    steps = steps_in(folder)
    return str(folder / f'ckpt-{steps[-1]}') if steps else None


def steps_in(folder: pathlib.Path) -> list[int]:
    """The steps of the checkpoints in a folder, in order. The .index is written last."""
    return sorted(int(m[1]) for p in folder.glob('ckpt-*.index') if (m := re.fullmatch(r'ckpt-(\d+)\.index', p.name)))


def _remove(folder: pathlib.Path, step: int) -> None:
    for file in folder.glob(f'ckpt-{step}.*'):
        file.unlink()


def keep_only(folder: pathlib.Path, step: int) -> None:
    """Removes all checkpoints of a folder but that of `step`, and what is half written."""
    for file in folder.glob('ckpt-*'):
        if file.name.partition('.')[0] != f'ckpt-{step}' or 'tempstate' in file.name:
            shutil.rmtree(file) if file.is_dir() else file.unlink()
    _list_newest(folder)


def _list_newest(folder: pathlib.Path) -> None:
    """Writes the file `checkpoint`, by which tf.train.latest_checkpoint finds the newest."""
    paths = [f'ckpt-{step}' for step in steps_in(folder)]
    if paths:
        tf.compat.v1.train.update_checkpoint_state(str(folder), paths[-1], paths)
