"""Images as people have them: which files of a folder are some, and each as the picture that a viewer shows."""

import collections
import dataclasses
import os
import pathlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from ctl.errors import UserError
from ctl.paths import as_utf8

# Opened by content, as far as this Pillow was built for them. It knows more, but those run other programs, or are no
# pictures by themselves.
Image.init()
FORMATS = ('PNG', 'JPEG', 'WEBP', 'AVIF', 'GIF', 'BMP', 'TIFF', 'PPM', 'TGA', 'ICO', 'JPEG2000')
FORMATS = tuple(name for name in FORMATS if name in Image.OPEN)
# What the systems of others leave in folders: no one's pictures.
LEFT_BEHIND = ('__MACOSX', 'Thumbs.db', 'desktop.ini', 'lost+found')
WHITE = (255, 255, 255, 255)


class BadImage(Exception):
    """A file that no picture can be made of. The message says why, to follow its name."""


@dataclasses.dataclass(frozen=True)
class Found:
    """What a folder has.

    Attributes:
      images: files to be opened, sorted; some may turn out to be damaged.
      hidden: files that are hidden or left behind by a system, or are in such folders.
      lost: links to what is not there, pipes and devices.
      others: suffix -> files that are no image.
    """

    images: list[pathlib.Path]
    hidden: int
    lost: list[pathlib.Path]
    others: collections.Counter[str]

    def left_out(self) -> str:
        """What was not taken, in words; '' for nothing."""
        kinds = ', '.join(f'{suffix or "without a suffix"} {n:,}' for suffix, n in sorted(self.others.items()))
        parts = [f'{sum(self.others.values()):,} that are no images ({kinds})'] if kinds else []
        parts += [f'{self.hidden:,} in hidden places'] if self.hidden else []
        parts += [f'{len(self.lost):,} links that lead nowhere, or pipes ({self.lost[0]})'] if self.lost else []
        return f'Files left out: {", ".join(parts)}.' if parts else ''


def find(folder: pathlib.Path) -> Found:
    """Every image below a folder, also behind links; raises UserError when it or one in it cannot be read."""
    if not os.path.isdir(folder):
        raise UserError(f'{folder}: is no folder, or cannot be reached.')
    suffixes = {suffix for suffix, name in Image.registered_extensions().items() if name in FORMATS}
    images, hidden, lost, others = [], 0, [], collections.Counter()
    for path in _files(folder):
        suffix = path.suffix.lower()
        if _is_hidden(path, folder):
            hidden += 1
        elif not os.path.isfile(path):
            lost.append(path)
        elif suffix in suffixes or _opens(path):
            as_utf8(str(path), 'FOLDER')
            images.append(path)
        else:
            others[suffix] += 1
    return Found(sorted(images), hidden, lost, others)


def _is_hidden(path: pathlib.Path, folder: pathlib.Path) -> bool:
    return any(part.startswith('.') or part in LEFT_BEHIND for part in path.relative_to(folder).parts)


def _files(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """What is no folder below a folder; a folder that several links name is read once."""

    def refuse(error: OSError):
        if not _is_hidden(pathlib.Path(error.filename), folder):
            raise UserError(f'{error.filename}: is a folder that cannot be read: {error.strerror}.')

    seen = set()
    for place, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        about = os.stat(place)
        if (about.st_dev, about.st_ino) in seen:
            folders.clear()
            continue
        seen.add((about.st_dev, about.st_ino))
        folders.sort()
        yield from (pathlib.Path(place, name) for name in sorted(names))


def _opens(path: pathlib.Path) -> bool:
    try:
        with _quietly_open(path):
            return True
    except PermissionError:
        return True  # to be named by whoever reads it
    except Exception:  # whatever Pillow's readers raise for bytes that are none of theirs
        return False


def _quietly_open(path: pathlib.Path) -> Image.Image:
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # of large images, before the size at which they are refused
        try:
            return Image.open(path, formats=FORMATS)
        except UnidentifiedImageError:
            raise BadImage('is no image' if path.stat().st_size else 'has 0 bytes') from None
        except Image.DecompressionBombError:
            raise BadImage(f'has more than {2 * Image.MAX_IMAGE_PIXELS:,} pixels: shrink it first') from None


def square(path: pathlib.Path, size: int, channels: int) -> np.ndarray:
    """The picture as viewers show it, shrunk or enlarged until its shorter side fits, and cut to its middle.

    Turned as its EXIF says; the first of an animation; in 8 bits; on white where it is transparent.

    Args:
      path: of the file.
      size: height and width, pixels.
      channels: 3 for colour, 1 for grey.

    Returns:
      uint8 [size, size, channels].

    Raises:
      BadImage: when there is no picture in it.
    """
    try:
        with _quietly_open(path) as image:
            tags = dict(getattr(image, 'tag_v2', {}))  # which its copies have not
            image.draft(None, (2 * size, 2 * size))  # a large JPEG is decoded at a fraction of its size
            image = _in_8_bits(_upright(image), image.format, tags)
    except BadImage:
        raise
    except Exception as error:  # whatever Pillow's readers raise for damaged files
        raise BadImage(f'cannot be read: {" ".join(str(error).split()) or type(error).__name__}') from None
    image = ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC)
    image = image.convert('RGB' if channels == 3 else 'L')
    return np.asarray(image, np.uint8).reshape(size, size, channels)


def _upright(image: Image.Image) -> Image.Image:
    image.load()
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # whatever Pillow raises for EXIF that is damaged, which is no fault of the picture
        return image


def _in_8_bits(image: Image.Image, kind: str, tags: Mapping[int, Any]) -> Image.Image:
    """The same picture as RGB or L, on white; raises BadImage for pixels of which nobody knows the scale.

    Args:
      tags: of a TIFF: 258 is its bits a sample, and 262 is 0 where 0 is white (TIFF 6.0, Adobe 1992, section 8).
    """
    if image.mode.startswith('I;16') or (image.mode == 'I' and kind in ('PNG', 'PPM')):
        whitest = 2 ** np.ravel(tags.get(258, 16))[0] - 1
        grey = (np.asarray(image).astype(np.float64) * 255 / whitest).round().clip(0, 255).astype(np.uint8)
        return Image.fromarray(255 - grey if tags.get(262) == 0 else grey)
    if image.mode in ('I', 'F'):
        raise BadImage('has pixels of 32 bits, whose black and white are unknown: store it with 8 or 16 bits')
    if image.has_transparency_data:
        image = image.convert('RGBA')
        return Image.alpha_composite(Image.new('RGBA', image.size, WHITE), image).convert('RGB')
    return image if image.mode in ('RGB', 'L') else image.convert('RGB')
