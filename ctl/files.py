"""Files that are there whole or not at all, whoever is killed in between, also when the power fails.

And the folder of those to be made again.
"""

import contextlib
import errno
import os
import pathlib
import re
import resource
import shutil
import tempfile
from collections.abc import Iterator

from ctl.errors import GuardError, UserError

# Files and connections that a run has open beside its records: it needs some 10, and more with other workers.
FEWEST_OPEN, WANTED_OPEN = 32, 512


def cache_folder() -> pathlib.Path:
    """$XDG_CACHE_HOME/ctl, or ~/.cache/ctl. It may be deleted at any time between runs."""
    home = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
    if home.startswith('~'):
        raise UserError('this user has no home folder for a cache: set XDG_CACHE_HOME to a folder that can be written.')
    return pathlib.Path(home) / 'ctl'


def allow_open(number: int, key: str) -> None:
    """Sees to it that this process may hold so many files open, beside a few of its own: many are given 1,024.

    Raises:
      UserError: when the machine does not allow it. TensorFlow would end the process where it lacks one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = float('inf') if hard == resource.RLIM_INFINITY else hard
    if number + FEWEST_OPEN > most:
        raise UserError(
            f'{key}: as many files are read side by side, and `ulimit -Hn` allows {hard} open ones. Raise it, or take '
            'fewer shards in a run that begins.'
        )
    if soft != resource.RLIM_INFINITY and soft < number + WANTED_OPEN:
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(min(most, number + WANTED_OPEN)), hard))


def sync(path: pathlib.Path) -> None:
    """Waits until a file, or all that is under a folder and its list of it, is on the disk.

    A name may get there before what it stands for: what is renamed is synced before, and what is removed goes after
    the disk has what takes its place.
    """
    if path.is_dir():
        for inside in path.iterdir():
            sync(inside)
    _sync_one(path)


def _sync_one(path: pathlib.Path) -> None:
    """A file, or a folder's list of what is in it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that has no such thing for folders
            raise
    finally:
        os.close(handle)


def sync_list(folder: pathlib.Path) -> None:
    """Waits until the disk has a folder, and which files are in it; not what these hold."""
    _sync_one(folder)
    _sync_one(folder.absolute().parent)


def _replace(scratch: pathlib.Path, path: pathlib.Path) -> None:
    """Renames a file or folder, and returns when the disk has it."""
    sync(scratch)
    os.replace(scratch, path)
    _sync_one(path.absolute().parent)


def replace_text(path: pathlib.Path, text: str) -> None:
    """Writes a small file in the place of the one that is there. For a file that one process writes.

    What a kill leaves is `.<name>.new`, which the next call writes over.
    """
    scratch = path.with_name(f'.{path.name}.new')
    scratch.write_text(text, encoding='utf8')
    _replace(scratch, path)


def check_writable(path: pathlib.Path) -> None:
    """Raises UserError where `appears_whole` would: for before what is to be written there has taken its time."""
    _make_scratch(path).rmdir()


def _make_scratch(path: pathlib.Path) -> pathlib.Path:
    """A new folder beside `path`; raises UserError when there can be none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return pathlib.Path(tempfile.mkdtemp(prefix=f'.{path.name}-', dir=path.parent))
    except OSError as error:
        hint = ': set XDG_CACHE_HOME to a folder that can' if path.is_relative_to(cache_folder()) else ''
        raise UserError(f'{path.parent} cannot be written ({error.strerror}){hint}.') from None


@contextlib.contextmanager
def appears_whole(path: pathlib.Path, any_will_do: bool = True) -> Iterator[pathlib.Path]:
    """Gives a temporary name beside `path` to write a file or make a folder under, and renames it when all went well.

    Args:
      path: of what is made.
      any_will_do: whether others make the same: where another was first, its folder stays.

    Raises:
      UserError: when the folder of `path` cannot be written, or another was first whose will not do.
      GuardError: when the disk is full, by whatever library says so.
    """
    scratch = _make_scratch(path)
    try:
        yield scratch / path.name
        try:
            _replace(scratch / path.name, path)
        except OSError:
            if not path.is_dir():
                raise
            if not any_will_do:
                raise UserError(
                    f'{path}: another program has made it meanwhile. Name another, and start again.'
                ) from None
    except Exception as error:
        if not re.search('No space left|quota exceeded', str(error)):
            raise
        raise GuardError(f'{path} cannot be written: the disk is full. Nothing of it is left.') from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
