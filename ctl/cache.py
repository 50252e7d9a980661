"""Files that can be made again: where they live, and how they appear whole or not at all."""

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

from ctl.errors import UserError


def cache_folder() -> pathlib.Path:
    """$XDG_CACHE_HOME/ctl, or ~/.cache/ctl. It may be deleted at any time between runs."""
    home = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
    return pathlib.Path(home) / 'ctl'


@contextlib.contextmanager
def appears_whole(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Gives a temporary name beside `path` to write a file or make a folder under, and renames it when all went well.

    Whoever is killed in between leaves nothing at `path`. Where another process was first, its folder stays.

    Raises:
      UserError: when the folder of `path` cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = pathlib.Path(tempfile.mkdtemp(prefix=f'.{path.name}-', dir=path.parent))
    except OSError as error:
        hint = ': set XDG_CACHE_HOME to a folder that can' if path.is_relative_to(cache_folder()) else ''
        raise UserError(f'{path.parent} cannot be written ({error.strerror}){hint}.') from None
    try:
        yield scratch / path.name
        try:
            os.replace(scratch / path.name, path)
        except OSError:
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
