"""Indexes on disk: for every folder of data one file, beside the data or in the cache folder, four bytes a record."""

import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ctl.data.scan import Damage, FileRecords
from ctl.errors import UserError
from ctl.files import appears_whole, cache_folder, check_writable

# Beside the data; a glob like `folder/*` does not match it.
BESIDE = '.ctl-index.npz'
# Raise it when the fields change, or what a fingerprint is made of.
VERSION = 1


def is_as_indexed(path: str, content: FileRecords) -> bool:
    """Whether the file's size and modification time are those of when it was indexed."""
    try:
        stat = os.stat(path)
    except OSError:
        return False
    return (stat.st_size, stat.st_mtime_ns) == (content.size, content.changed)


def load(folder: str, files: Sequence[str], say: Callable[[str], None]) -> dict[str, FileRecords]:
    """What is known of `files`, all in `folder`, and still holds: from beside them, else from the cache.

    `say` is told of a table that cannot be read. That in the cache is made anew, once its files are indexed again.
    """
    known: dict[str, FileRecords] = {}
    remedies = {
        _beside(folder): 'remove it, or write it anew with tools.index_records --write',
        _in_cache(folder): 'the files are indexed again',
    }
    for table, remedy in remedies.items():
        missing = [path for path in files if path not in known]
        if missing:
            contents, problem = _read(table)
            if problem:
                say(f'WARNING: the index {table} cannot be read ({problem}), and is not used: {remedy}.')
            named = {path: contents.get(os.path.basename(path)) for path in missing}
            known.update({path: c for path, c in named.items() if c and is_as_indexed(path, c)})
    return known


def check_cache(folder: str) -> None:
    """Raises UserError when the table of `folder` could not be written: before its files are read, which takes long."""
    check_writable(_in_cache(folder))


def add_to_cache(folder: str, contents: Mapping[str, FileRecords]) -> None:
    """Adds what was found out about files of `folder`, by path, to what the cache has of others and still holds."""
    table = _in_cache(folder)
    if table.is_dir():  # nothing else could take its place
        shutil.rmtree(table)
    _write(table, {**_read_still_true(table, folder), **_by_name(folder, contents)})


def write_beside(folder: str, contents: Mapping[str, FileRecords]) -> pathlib.Path:
    """Writes what is known of files of `folder` into it, by path; raises UserError when that cannot be written."""
    table = _beside(folder)
    _write(table, {**_read_still_true(table, folder), **_by_name(folder, contents)})
    return table


def _read_still_true(table: pathlib.Path, folder: str) -> dict[str, FileRecords]:
    return {name: c for name, c in _read(table)[0].items() if is_as_indexed(os.path.join(folder, name), c)}


def _by_name(folder: str, contents: Mapping[str, FileRecords]) -> dict[str, FileRecords]:
    return {os.path.basename(path): c for path, c in contents.items() if os.path.dirname(path) == folder}


def _beside(folder: str) -> pathlib.Path:
    return pathlib.Path(folder) / BESIDE


def _in_cache(folder: str) -> pathlib.Path:
    digest = hashlib.sha256(os.path.abspath(folder).encode()).hexdigest()[:32]
    return cache_folder() / 'index' / f'{digest}.npz'


def _write(table: pathlib.Path, contents: Mapping[str, FileRecords]) -> None:
    if table.is_dir():
        raise UserError(f'{table} is a folder, where an index is to be: remove it.')
    entries = []
    for name, content in contents.items():
        entry = {field: getattr(content, field) for field in ('size', 'changed', 'compression', 'fingerprint')}
        damaged = [dataclasses.astuple(damage) for damage in content.damaged]
        entries.append({'name': name, 'records': len(content.sizes), 'damaged': damaged, **entry})
    about = json.dumps({'version': VERSION, 'files': entries}).encode()
    sizes = np.concatenate([content.sizes for content in contents.values()])
    with appears_whole(table) as scratch, open(scratch, 'wb') as stream:
        np.savez(stream, about=np.frombuffer(about, np.uint8), sizes=sizes)


def _read(table: pathlib.Path) -> tuple[dict[str, FileRecords], str]:
    """Name -> what the file holds, and why the table cannot be read, '' where it can or is not there."""
    try:
        return _read_sound(table), ''
    except FileNotFoundError:
        return {}, ''
    except Exception as error:  # whatever NumPy, zip, JSON and the fields make of bytes that are none of a table
        return {}, str(error) or type(error).__name__


def _read_sound(table: pathlib.Path) -> dict[str, FileRecords]:
    """Nothing of a table of another version."""
    with np.load(table) as arrays:
        about, sizes = json.loads(arrays['about'].tobytes()), arrays['sizes']
    if about['version'] != VERSION:
        return {}
    contents, end = {}, 0
    for entry in about['files']:
        start, end = end, end + entry.pop('records')
        damaged = tuple(Damage(*damage) for damage in entry.pop('damaged'))
        name = entry.pop('name')
        contents[name] = FileRecords(sizes=sizes[start:end], damaged=damaged, **entry)
    return contents
