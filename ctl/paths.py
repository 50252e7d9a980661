"""Paths as people write them: home folders, lists of globs, and names that look like patterns."""

import fnmatch
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
        os.fsencode(path).decode('utf8')
    except UnicodeDecodeError:
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
    whole, files, folders = folder + pattern, [], []
    if not pattern and os.path.isfile(folder):
        return [folder]
    for path in _expand(folder, pattern.split('/'), key) if pattern else [folder]:
        if os.path.isfile(path):
            files += [path] * (not _is_mark(path))
        elif os.path.isdir(path):
            folders.append(path)
        elif os.path.islink(path):
            raise UserError(f'{key}: {path} is a link to {os.readlink(path)}, which is not there.')
        elif os.path.exists(path):
            raise UserError(f'{key}: {path} is a pipe or a device, and files are read more than once: write one.')
    if files:
        return files
    if folders:
        inside = _pattern_for(folders[0], key)
        remedy = f'Name the files in it: {os.path.join(folders[0], inside)}' if inside else 'There is no file in it.'
        raise UserError(f'{key}={whole}: is a folder. {remedy}')
    raise UserError(f'{key}={whole}: no file matches. {_doubt(pattern)}')


def _expand(folder: str, parts: list[str], key: str) -> Iterator[str]:
    """What the rest of a glob matches in a folder, '' for this one.

    As glob.glob, which passes over folders that may not be read, and reads those again and again that links name twice.
    """
    part, *rest = parts
    if not part and rest:  # of two slashes
        yield from _expand(folder, rest, key)
    elif part == '**':
        for place in _folders_below(folder, key):
            yield from _expand(place, rest or ['*'], key)
    elif not re.search(r'[*?[]', part):
        _check_open(folder, os.X_OK, key)
        if os.path.lexists(folder + part):
            yield from _expand(f'{folder}{part}/', rest, key) if rest else [folder + part]
    else:
        for name in _names_in(folder, key):
            if fnmatch.fnmatchcase(name, part) and (part.startswith('.') or not name.startswith('.')):
                yield from _expand(f'{folder}{name}/', rest, key) if rest else [folder + name]


def _folders_below(folder: str, key: str) -> Iterator[str]:
    """It and every folder below it that is not hidden; each once, however many links name it."""
    seen, waiting = set(), [folder] if os.path.isdir(folder or '.') else []
    while waiting:
        place = waiting.pop()
        about = os.stat(place or '.')
        if (about.st_dev, about.st_ino) not in seen:
            seen.add((about.st_dev, about.st_ino))
            yield place
            names = [name for name in _names_in(place, key) if not name.startswith('.')]
            waiting += [f'{place}{name}/' for name in names if os.path.isdir(place + name)][::-1]


def _names_in(folder: str, key: str) -> list[str]:
    """What is in a folder, sorted; nothing where it is none."""
    if not os.path.isdir(folder or '.') or os.path.basename(folder.rstrip('/')) == 'lost+found':
        return []
    _check_open(folder, os.R_OK | os.X_OK, key)
    return sorted(os.listdir(folder or '.'))


def _check_open(folder: str, mode: int, key: str) -> None:
    if os.path.isdir(folder or '.') and not os.access(folder or '.', mode):
        raise UserError(f'{key}: the folder {folder.rstrip("/") or os.getcwd()} cannot be read: permission denied.')


def _is_mark(path: str) -> bool:
    """Whether a file only says that others are complete: Hadoop and Spark put an empty _SUCCESS beside theirs."""
    return os.path.basename(path).startswith('_') and not os.path.getsize(path)


def _pattern_for(folder: str, key: str) -> str:
    """A glob of the files in a folder that data.train, data.eval or another key may mean; '' where there are none."""
    word = re.sub(r'[*?[]', '?', key.rpartition('.')[2])
    for pattern in (f'{word}*', '*.tfrecord*', '*', f'**/{word}*', '**/*.tfrecord*', '**/*'):
        if any(map(os.path.isfile, _expand(f'{folder}/', pattern.split('/'), key))):
            return pattern
    return ''


def _doubt(pattern: str) -> str:
    if '$' in pattern:
        return 'In single quotes a shell leaves $ alone: take double quotes.'
    if '{' in pattern:
        return 'Braces are none of its signs: write two globs, with a comma between them.'
    return f'Is the path right, seen from {os.getcwd()}?'
