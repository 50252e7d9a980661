"""Text as people have it: found by globs, in UTF-8 or with a byte order mark, with any line ending."""

import codecs
import io
import itertools
import pathlib
import shlex
from collections.abc import Iterator

from ctl.data.streams import HEADER_BYTES, record_length
from ctl.errors import UserError
from ctl.kinds import START_BYTES, kind_of
from ctl.paths import find_files

# By the mark that a file begins with; the longer first, for UTF-32's begins as UTF-16's does.
_MARKS = {
    codecs.BOM_UTF32_LE: 'utf-32',
    codecs.BOM_UTF32_BE: 'utf-32',
    codecs.BOM_UTF16_LE: 'utf-16',
    codecs.BOM_UTF16_BE: 'utf-16',
    codecs.BOM_UTF8: 'utf-8-sig',
}
# Of the bytes of a text in UTF-16, at least so many are zero: every second of what is ASCII in it.
_ZEROS = 1 / 20
_WIDE = ('UTF-32LE', 'UTF-32BE', 'UTF-16LE', 'UTF-16BE')
MOST_LOOKED_AT = 1 << 20  # of a file that is in none of these, bytes
_READABLE = 0.99
# Of the bytes of a text in a European language, so many are ASCII; in others, hardly more than spaces.
_MOSTLY = 0.7


def read_documents(patterns: str) -> Iterator[list[str]]:
    """Documents of sentences from text files: a sentence a line, a blank line between documents.

    Args:
      patterns: globs, separated by commas, as --text has them.

    Raises:
      UserError: when no file matches, or one is no text.
    """
    for path in find_files(patterns, '--text', may_be_empty=True):
        # str.splitlines would also part lines at form feeds and at separators that stand inside of sentences.
        lines = (line.strip() for line in io.StringIO(read_text(pathlib.Path(path)), newline=None))
        for is_text, group in itertools.groupby(lines, bool):
            if is_text:
                yield list(group)


def read_text(path: pathlib.Path) -> str:
    """All of a file; raises UserError, naming the place, where it is no text in UTF-8, nor marked as another."""
    data = path.read_bytes()
    kind, remedy = kind_of(data[:START_BYTES])
    if kind:
        raise UserError(f'{path}: is {kind}, and no text: {remedy or "make text of it"}.')
    if record_length(data[:HEADER_BYTES]) is not None:
        raise UserError(f'{path}: is a TFRecord file, and no text: train on it, or name the text it was made from.')
    encoding = next((name for mark, name in _MARKS.items() if data.startswith(mark)), '')
    if not encoding and b'\0' in data:
        raise UserError(f'{path}: {_about_zeros(path, data)}')
    try:
        return data.decode(encoding or 'utf-8')
    except UnicodeDecodeError as error:
        if encoding.startswith(('utf-16', 'utf-32')):
            raise UserError(f'{path}: begins as {encoding.upper()} does, and is none: write it again.') from None
        line, byte = data.count(b'\n', 0, error.start) + 1, data[error.start]
        where = f'{path}: line {line} has the byte 0x{byte:02x}, which is no UTF-8'
        raise UserError(f'{where}. {_about_bytes(path, data)}') from None


def _about_zeros(path: pathlib.Path, data: bytes) -> str:
    """Why there may be zero bytes in a file that is to be text, and what to do."""
    line = data.count(b'\n', 0, data.index(b'\0')) + 1
    if data.count(0) < _ZEROS * len(data) and _is_nearly_utf8(data):
        remove = _command(path, r"tr -d '\000' <")
        return f'line {line} has a zero byte, which text has not. Take such out, and start again: {remove}'
    encoding = next((name for name in _WIDE if _is_text_in(name, data)), '')
    if encoding:
        convert = _command(path, f'iconv -f {encoding} -t UTF-8')
        return f'line {line} has a zero byte, as text in {encoding} has. Convert it, and start again: {convert}'
    return f'is no text: line {line} has a zero byte, and much of it is no UTF-8. Name text files only.'


def _is_text_in(encoding: str, data: bytes) -> bool:
    """Whether nearly all of these bytes are what a person could read."""
    text = data[:MOST_LOOKED_AT].decode(encoding, 'replace')
    readable = sum(character.isprintable() or character.isspace() for character in text.replace('\ufffd', '\0'))
    return readable >= _READABLE * len(text)


def _about_bytes(path: pathlib.Path, data: bytes) -> str:
    """What to do about a file that is text in another encoding, or damaged."""
    if _is_nearly_utf8(data):
        remove = _command(path, 'iconv -c -f UTF-8 -t UTF-8')
        return f'Most of the others are: leave such out, and start again: {remove}'
    start = data[:MOST_LOOKED_AT]
    if sum(byte < 0x80 for byte in start) >= _MOSTLY * len(start):
        # Windows-1252 is Latin-1, with quotation marks and dashes where that has nothing.
        convert = _command(path, 'iconv -f WINDOWS-1252 -t UTF-8')
        return f'Convert it from what it is in, Windows-1252 say, and start again: {convert}'
    convert = _command(path, 'iconv -f ENCODING -t UTF-8')
    return f'Convert it, with what it is in (GB18030, SHIFT_JIS, KOI8-R, ...) for ENCODING: {convert}'


def _is_nearly_utf8(data: bytes) -> bool:
    """Whether most of what is beyond ASCII is UTF-8; of text in another encoding hardly anything is."""
    text = data.decode('utf-8', 'replace')
    damaged = text.count('\ufffd')
    return sum(character > '\x7f' for character in text) >= 2 * damaged


def _command(path: pathlib.Path, words: str) -> str:
    """What makes the file anew by `words` under its own name, so that a glob finds it, and no other."""
    here, old = shlex.quote(str(path)), shlex.quote(f'{path}.old')
    return f'mv -n {here} {old} && {words} {old} > {here}'
