"""Images in records that training would see otherwise than a person who opens them."""

import io
import warnings

from PIL import Image

_ORIENTATION = 0x112  # of EXIF


def oddity(encoded: bytes) -> str:
    """What TensorFlow's decoder takes no notice of in an image, in words; '' for nothing, or for what is no image."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # of large ones
            image = Image.open(io.BytesIO(encoded))
            if image.getexif().get(_ORIENTATION, 1) not in (0, 1):
                return 'is to be turned, by its EXIF, and training sees it as it is stored'
            if getattr(image, 'n_frames', 1) > 1 and image.format != 'MPO':
                return 'is an animation, and training sees the first picture'
            if image.mode.startswith('I;16') or image.mode == 'I':
                return 'has 16 bits, and training sees 8'
            if image.has_transparency_data:
                return 'is transparent in parts, and training sees what is beneath'
    except Exception:  # whatever Pillow raises for what is damaged: the decoder tells
        return ''
    return ''
