"""What a file is, by how it begins: for an error about one that was taken for another."""

import codecs

# How it begins -> what it is, and what makes it readable; '' where that depends on what it was to be.
_BEGINNINGS = {
    b'\x1f\x8b': ('compressed by gzip', 'unpack it with gunzip'),
    b'BZh': ('compressed by bzip2', 'unpack it with bunzip2'),
    b'\xfd7zXZ': ('compressed by xz', 'unpack it with unxz'),
    b'\x28\xb5\x2f\xfd': ('compressed by zstd', 'unpack it with unzstd'),
    b'PK\x03\x04': ('a ZIP archive or an office document', 'unpack it, or save it as plain text'),
    b'version https://git-lfs': ('what Git LFS puts in the place of a file', 'fetch the file with `git lfs pull`'),
    b'%PDF-': ('a PDF', 'make text of it with pdftotext'),
    b'PAR1': ('a Parquet file', ''),
    b'ARROW1': ('an Arrow file', ''),
    b'\x89HDF': ('an HDF5 file', ''),
    b'\x93NUMPY': ('a NumPy array', ''),
    b'SQLite format 3': ('an SQLite database', ''),
    b'\x89PNG': ('a PNG image', ''),
    b'\xff\xd8\xff': ('a JPEG image', ''),
    b'GIF8': ('a GIF image', ''),
    b'\x7fELF': ('a program', ''),
}
# These are text by themselves; a text may begin with the letters of the others.
_OF_CHARACTERS = (b'version https://git-lfs', b'%PDF-')
# A tar archive says what it is here.
_TAR_AT, _TAR = 257, b'ustar'
START_BYTES = 512  # as much of a file as is looked at


def kind_of(start: bytes) -> tuple[str, str]:
    """What a file is that begins with `start`, and what makes it readable; '' each where it is not known."""
    is_text = looks_like_text(start)
    if start[_TAR_AT:].startswith(_TAR) and not is_text:
        return 'a tar archive', 'unpack it with `tar -xf`'
    return next(
        (
            kind
            for begins, kind in _BEGINNINGS.items()
            if start.startswith(begins) and (begins in _OF_CHARACTERS or not is_text)
        ),
        ('', ''),
    )


def looks_like_text(start: bytes) -> bool:
    """Whether these bytes, which may end inside of a character, are UTF-8 that a person could read."""
    try:
        text = codecs.getincrementaldecoder('utf8')().decode(start)
    except UnicodeDecodeError:
        return False
    return all(character.isprintable() or character.isspace() for character in text)
