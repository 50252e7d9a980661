"""Text as people have it: found by globs, in UTF-8 or with a byte order mark, with any line ending."""

import codecs
import itertools
import pathlib
import shlex
from collections.abc import Iterator

from ctl.errors import UserError
from ctl.paths import find_files

# By the mark that a file begins with; the longer first, for UTF-32's begins as UTF-16's does.
_MARKS = {
    codecs.BOM_UTF32_LE: 'utf-32',
    codecs.BOM_UTF32_BE: 'utf-32',
    codecs.BOM_UTF16_LE: 'utf-16',
    codecs.BOM_UTF16_BE: 'utf-16',
    codecs.BOM_UTF8: 'utf-8-sig',
}
# What people name by mistake, by how it begins -> what it is, and what makes text of it.
_NO_TEXT = {
    b'\x1f\x8b': ('compressed by gzip', 'unpack it with gunzip'),
    b'BZh': ('compressed by bzip2', 'unpack it with bunzip2'),
    b'\xfd7zXZ': ('compressed by xz', 'unpack it with unxz'),
    b'\x28\xb5\x2f\xfd': ('compressed by zstd', 'unpack it with unzstd'),
    b'PK\x03\x04': ('a ZIP archive or an office document', 'unpack it, or save it as plain text'),
    b'%PDF': ('a PDF', 'make text of it with pdftotext'),
    b'PAR1': ('a Parquet file', 'write its text column to a text file'),
}


def read_documents(patterns: str) -> Iterator[list[str]]:
    """Documents of sentences from text files: a sentence a line, a blank line between documents.

    Args:
      patterns: globs, separated by commas, as --text has them.

    Raises:
      UserError: when no file matches, or one is no text.
    """
    for path in find_files(patterns, '--text', may_be_empty=True):
        lines = (line.strip() for line in read_text(pathlib.Path(path)).splitlines())
        for is_text, group in itertools.groupby(lines, bool):
            if is_text:
                yield list(group)


def read_text(path: pathlib.Path) -> str:
    """All of a file; raises UserError, naming the place, where it is no text in UTF-8, nor marked as another."""
    data = path.read_bytes()
    for start, (kind, remedy) in _NO_TEXT.items():
        if data.startswith(start):
            raise UserError(f'{path}: is {kind}, and no text: {remedy}.')
    encoding = next((name for mark, name in _MARKS.items() if data.startswith(mark)), '')
    if not encoding and b'\0' in data:
        line = data.count(b'\n', 0, data.index(b'\0')) + 1
        order = 'BE' if data[::2].count(0) > data[1::2].count(0) else 'LE'
        raise UserError(
            f'{path}: line {line} has a zero byte, as text in UTF-16 has. Convert the file: '
            f'{_conversion(path, f"UTF-16{order}")}'
        )
    try:
        return data.decode(encoding or 'utf-8')
    except UnicodeDecodeError as error:
        if encoding.startswith(('utf-16', 'utf-32')):
            raise UserError(f'{path}: begins as {encoding.upper()} does, and is none: write it again.') from None
        line, byte = data.count(b'\n', 0, error.start) + 1, data[error.start]
        raise UserError(
            f'{path}: line {line} has the byte 0x{byte:02x}, which is no UTF-8. Convert the file, from Latin-1 say: '
            f'{_conversion(path, "LATIN1")}'
        ) from None


def _conversion(path: pathlib.Path, encoding: str) -> str:
    other = path.with_name(f'{path.stem}-utf8{path.suffix}')
    return f'iconv -f {encoding} -t UTF-8 {shlex.quote(str(path))} > {shlex.quote(str(other))}'
