"""Paths as people write them: home folders, lists of globs, and names that look like patterns."""

import glob
import os
import pathlib
import re
from collections.abc import Iterable, Iterator

from ctl.errors import UserError

_URL = re.compile(r'[A-Za-z][A-Za-z0-9+.-]*://')
_MOST_CHARACTERS = 4096  # of a path; Linux's PATH_MAX


def local_path(text: str, key: str) -> pathlib.Path:
    """A path on this machine; shells leave the ~ of --workdir=~/run alone.

    Args:
      text: as a person wrote it.
      key: the flag or config key it comes from, for errors.

    Raises:
      UserError: for a URL.
    """
    return pathlib.Path(_expanded(text, key))


def _expanded(text: str, key: str) -> str:
    if text.startswith('file://'):
        raise UserError(f'{key}={text}: write the path alone: {text.removeprefix("file://")}')
    if _URL.match(text):
        raise UserError(
            f'{key}={text}: is an address, and ctl reads and writes folders of this machine only. Mount the bucket '
            '(with gcsfuse, say) or copy the files, and name that folder.'
        )
    path = os.path.expanduser(text)
    if path.startswith('~') and not os.path.lexists(path):
        raise UserError(f'{key}={text}: there is no such user here, whose home ~ would be. A name with ~ is ./{text}')
    return as_utf8(path, key)


def as_utf8(path: str, key: str) -> str:
    """The path; raises UserError where its name is in no encoding that others could write down."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise UserError(f'{key}: {os.fsencode(path)!r} is a name that is no UTF-8. Rename it.') from None
    return path


def find_files(patterns: str | Iterable[str], key: str, may_be_empty: bool = False) -> list[str]:
    """The files that globs match, sorted, each once.

    What exists as it is written is no pattern: of `runs[1]/train-*` only the end is one where there is a folder
    `runs[1]`; and a comma in its name separates nothing.

    Args:
      patterns: globs, separated by commas; or several such lists. `**` is any number of folders, ~ the home folder.
      key: the flag or config key they come from, for errors.
      may_be_empty: whether files of 0 bytes are taken too.

    Raises:
      UserError: when a glob matches no file, or one is empty or cannot be read.
    """
    files: dict[str, str] = {}
    for folder, pattern in _split([patterns] if isinstance(patterns, str) else patterns, key):
        found = _matching(folder, pattern, key)
        files.update({os.path.abspath(path): path for path in found})
    if not files:
        raise UserError(f'{key}={patterns!r}: names no file.')
    for path in sorted(files.values()):
        as_utf8(path, key)
        if not os.access(path, os.R_OK):
            raise UserError(f'{key}: {path} cannot be read: permission denied.')
        if not may_be_empty and not os.path.getsize(path):
            raise UserError(f'{key}: {path} has 0 bytes. Remove it, or write it again.')
    return sorted(files.values())


def _split(lists: Iterable[str], key: str) -> Iterator[tuple[str, str]]:
    """Each item of comma-separated lists as a leading part that exists as it stands, '' for none, and a glob in it."""
    for rest in lists:
        while rest := rest.lstrip(' ,\n'):
            rest = _expanded(rest, key)
            there = _longest_that_exists(rest)
            pattern, _, rest = rest[len(there) :].partition(',')
            yield there, pattern.strip()


def _longest_that_exists(text: str) -> str:
    """The longest beginning of `text`, up to a slash, a comma or its end, that is the name of something."""
    start = text[: _MOST_CHARACTERS + 1]
    ends = [match.start() + (match[0] == '/') for match in re.finditer('[/,]', start)]
    for end in [*ends, len(start)][::-1]:
        if os.path.exists(text[:end]):
            return text[:end]
    return ''


def _matching(folder: str, pattern: str, key: str) -> list[str]:
    """The files that a glob in a folder matches; raises UserError for none, saying what is there instead."""
    whole = folder + pattern
    if not pattern and os.path.isfile(folder):
        return [folder]
    found = [folder + each for each in glob.glob(pattern, root_dir=folder or None, recursive=True)] if pattern else []
    files = []
    for path in found or [folder]:
        if os.path.isfile(path):
            files += [path] * (not _is_mark(path))
        elif os.path.islink(path) and not os.path.exists(path):
            raise UserError(f'{key}: {path} is a link to {os.readlink(path)}, which is not there.')
        elif os.path.exists(path) and not os.path.isdir(path):
            raise UserError(f'{key}: {path} is a pipe or a device, and files are read more than once: write one.')
    for path in _looked_into(folder, pattern):
        if os.path.isdir(path) and not os.access(path, os.R_OK | os.X_OK) and not path.endswith('lost+found'):
            raise UserError(f'{key}={whole}: the folder {path} cannot be read: permission denied.')
    if files:
        return files
    folders = [path for path in [folder, *found][bool(pattern) :] if os.path.isdir(path)]
    if folders:
        files = os.path.join(folders[0], _pattern_for(folders[0], key))
        raise UserError(f'{key}={whole}: is a folder. Name the files in it: {files}')
    raise UserError(f'{key}={whole}: no file matches. {_doubt(pattern)}')


def _looked_into(folder: str, pattern: str) -> Iterator[str]:
    """The folders whose files a glob goes through, which it passes over in silence where it may not."""
    yield folder or '.'
    ends = [match.start() for match in re.finditer('/', pattern)] + [len(pattern)] * pattern.endswith('**')
    for end in ends:
        yield from (folder + each for each in glob.iglob(pattern[:end], root_dir=folder or None, recursive=True))


def _is_mark(path: str) -> bool:
    """Whether a file only says that others are complete: Hadoop and Spark put an empty _SUCCESS beside theirs."""
    return os.path.basename(path).startswith('_') and not os.path.getsize(path)


def _pattern_for(folder: str, key: str) -> str:
    """A glob of the files in a folder that data.train, data.eval or another key may mean."""
    word = key.rpartition('.')[2]
    likely = (f'{glob.escape(word)}*', '*.tfrecord*')
    return next((pattern for pattern in likely if glob.glob(pattern, root_dir=folder)), '*')


def _doubt(pattern: str) -> str:
    if '$' in pattern:
        return 'In single quotes a shell leaves $ alone: take double quotes.'
    if '{' in pattern:
        return 'Braces are none of its signs: write two globs, with a comma between them.'
    return f'Is the path right, seen from {os.getcwd()}?'
