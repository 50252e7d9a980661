"""Other people's images: each is stored as a viewer shows it, or named."""

import io
import os
import pathlib
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from ctl.errors import UserError
from tests.rights import without_rights
from tools import image_files, make_image_records

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


def left_and_right(left=RED, right=BLUE, size=(40, 40)):
    """An image with two halves, width by height."""
    image = Image.new('RGB', size, left)
    image.paste(right, (size[0] // 2, 0, *size))
    return image


def save(image, path, **how):
    image.save(path, **how)
    return path


def close(found, wanted):
    return np.abs(np.asarray(found, int) - wanted).max() < 12


def turned(orientation):
    exif = Image.Exif()
    exif[0x112] = orientation
    return exif


@pytest.mark.parametrize(
    'orientation, where',
    # Of the pixel that is shown red: the left half of what is stored.
    [(1, 'left'), (2, 'right'), (3, 'right'), (4, 'left'), (5, 'top'), (6, 'top'), (7, 'bottom'), (8, 'bottom')],
)
@pytest.mark.parametrize('kind', ['jpg', 'png', 'webp', 'tiff'])
def test_a_picture_stands_as_its_exif_says(tmp_path, orientation, where, kind):  # N07
    quality = {'quality': 95} if kind in ('jpg', 'webp') else {}
    path = save(left_and_right(), tmp_path / f'a.{kind}', exif=turned(orientation), **quality)
    pixels = image_files.square(path, 8, 3)
    at = {'left': (4, 1), 'right': (4, 6), 'top': (1, 4), 'bottom': (6, 4)}
    assert close(pixels[at[where]], RED), pixels[:, :, 0]


def grey16(tmp_path):
    return save(Image.fromarray(np.full((20, 20), 0x8000, np.uint16)), tmp_path / 'a.png')


def colour16(tmp_path):
    """Pillow writes none."""
    rows = b''.join(b'\0' + struct.pack('>HHH', 0xFFFF, 0x8000, 0) * 20 for _ in range(20))

    def chunk(kind, data):
        return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))

    header = struct.pack('>IIBBBBB', 20, 20, 16, 2, 0, 0, 0)
    whole = b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', header) + chunk(b'IDAT', zlib.compress(rows)) + chunk(b'IEND', b'')
    (tmp_path / 'a.png').write_bytes(whole)
    return tmp_path / 'a.png'


def palette(tmp_path):
    return save(Image.new('RGB', (20, 20), RED).quantize(4), tmp_path / 'a.png')


def palette_see_through(tmp_path):
    return save(Image.new('RGB', (20, 20), RED).quantize(4), tmp_path / 'a.gif', transparency=0)


def grey_alpha(tmp_path):
    return save(Image.new('LA', (20, 20), (0, 128)), tmp_path / 'a.png')


def colour_alpha(tmp_path):
    return save(Image.new('RGBA', (20, 20), (*RED, 0)), tmp_path / 'a.webp', lossless=True)


def cmyk(tmp_path):
    return save(Image.new('CMYK', (20, 20), (0, 255, 255, 0)), tmp_path / 'a.jpg', quality=95)


def progressive(tmp_path):
    return save(Image.new('RGB', (20, 20), RED), tmp_path / 'a.jpg', progressive=True, quality=95)


def grey12(tmp_path):
    """As scientific cameras write: 12 bits, two samples in three bytes. Pillow writes none."""
    return tiff(tmp_path, bits=12, photometric=1, data=bytes([0x80, 0x08, 0x00]) * 200)


def white_is_zero(tmp_path):
    return tiff(tmp_path, bits=16, photometric=0, data=struct.pack('<H', 0x4000) * 400)


def tiff(tmp_path, bits, photometric, data):
    """20 x 20 grey pixels."""
    tags = {256: 20, 257: 20, 258: bits, 259: 1, 262: photometric, 273: 8, 277: 1, 278: 20, 279: len(data)}
    entries = b''.join(struct.pack('<HHII', tag, 4, 1, value) for tag, value in tags.items())
    end = struct.pack('<H', len(tags)) + entries + bytes(4)
    (tmp_path / 'a.tiff').write_bytes(b'II*\0' + struct.pack('<I', 8 + len(data)) + data + end)
    return tmp_path / 'a.tiff'


def one_bit(tmp_path):
    return save(Image.new('1', (20, 20), 1), tmp_path / 'a.tiff')


def animated(tmp_path):
    first, second = Image.new('RGB', (20, 20), RED), Image.new('RGB', (20, 20), BLUE)
    return save(first, tmp_path / 'a.gif', save_all=True, append_images=[second])


def animated_webp(tmp_path):
    first, second = Image.new('RGB', (20, 20), RED), Image.new('RGB', (20, 20), BLUE)
    return save(first, tmp_path / 'a.webp', save_all=True, append_images=[second], lossless=True)


def one_pixel(tmp_path):
    return save(Image.new('RGB', (1, 1), RED), tmp_path / 'a.bmp')


def a_line(tmp_path):
    return save(Image.new('RGB', (3000, 1), RED), tmp_path / 'a.png')


def damaged_exif(tmp_path):
    return save(Image.new('RGB', (20, 20), RED), tmp_path / 'a.jpg', exif=b'Exif\0\0II*\0\xff\xff\xff\xff', quality=95)


def wrong_suffix(tmp_path):
    return save(Image.new('RGB', (20, 20), RED), tmp_path / 'a.jpg', format='PNG')


@pytest.mark.parametrize(
    'make, shown',
    [
        (grey16, (128, 128, 128)),
        (colour16, (255, 128, 0)),
        (palette, RED),
        (palette_see_through, WHITE),
        (grey_alpha, (127, 127, 127)),
        (colour_alpha, WHITE),
        (cmyk, RED),
        (progressive, RED),
        (one_bit, WHITE),
        (grey12, (128, 128, 128)),
        (white_is_zero, (191, 191, 191)),
        (animated, RED),
        (animated_webp, RED),
        (one_pixel, RED),
        (a_line, RED),
        (damaged_exif, RED),
        (wrong_suffix, RED),
    ],
    ids=lambda value: getattr(value, '__name__', ''),
)
def test_every_kind_of_picture_is_what_a_viewer_shows(tmp_path, make, shown):
    path = make(tmp_path)
    assert close(image_files.square(path, 8, 3), shown)
    assert close(image_files.square(path, 8, 1), np.dot(shown, [0.299, 0.587, 0.114]))


def cut(tmp_path):
    whole = io.BytesIO()
    Image.effect_noise((90, 90), 60).save(whole, 'JPEG')
    (tmp_path / 'a.jpg').write_bytes(whole.getvalue()[: len(whole.getvalue()) // 2])
    return tmp_path / 'a.jpg'


def bomb(tmp_path):
    """40,000 x 40,000 pixels in a few bytes."""
    path = colour16(tmp_path)
    data = bytearray(path.read_bytes())
    data[16:24] = struct.pack('>II', 40000, 40000)
    data[29:33] = struct.pack('>I', zlib.crc32(data[12:29]))
    path.write_bytes(data)
    return path


def no_width(tmp_path):
    path = colour16(tmp_path)
    data = bytearray(path.read_bytes())
    data[16:20] = struct.pack('>I', 0)
    data[29:33] = struct.pack('>I', zlib.crc32(data[12:29]))
    path.write_bytes(data)
    return path


def floats(tmp_path):
    return save(Image.new('F', (20, 20), 0.5), tmp_path / 'a.tiff')


def a_page(tmp_path):
    (tmp_path / 'a.jpg').write_text('<html>404 Not Found</html>')
    return tmp_path / 'a.jpg'


def nothing(tmp_path):
    (tmp_path / 'a.png').touch()
    return tmp_path / 'a.png'


@pytest.mark.parametrize(
    'make, said',
    [
        (cut, 'cannot be read'),
        (bomb, 'pixels: shrink it first'),
        (no_width, 'cannot be read|is no image'),
        (floats, '32 bits'),
        (a_page, 'is no image'),
        (nothing, 'has 0 bytes'),
    ],
    ids=lambda value: getattr(value, '__name__', ''),
)
def test_what_is_no_picture_is_refused_with_a_reason(tmp_path, make, said):
    with pytest.raises(image_files.BadImage, match=said):
        image_files.square(make(tmp_path), 8, 3)


def test_what_systems_leave_in_folders_is_no_class_and_what_is_left_out_is_counted(tmp_path, capsys):  # N09, N11
    for i in range(20):
        folder = tmp_path / 'photos' / ('cat', 'dog')[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        save(left_and_right(), folder / f'{i}{(".png", ".webp", ".BMP", "")[i % 4]}', format=('PNG', 'WEBP')[i % 2])
    for name in ('.ipynb_checkpoints/0.png', '__MACOSX/cat/._0.png', 'cat/.DS_Store', 'cat/Thumbs.db'):
        path = tmp_path / 'photos' / name
        path.parent.mkdir(parents=True, exist_ok=True)
        save(left_and_right(), path, format='PNG')
    for name in ('labels.csv', 'cat/notes.txt', 'cat/more.txt', 'dog/photo.heic'):
        (tmp_path / 'photos' / name).write_text('text')
    assert make_image_records.main([str(tmp_path / 'photos'), f'--output={tmp_path / "records"}', '--size=8']) == 0
    out = capsys.readouterr().out
    assert 'Files left out: 4 that are no images (.csv 1, .heic 1, .txt 2), 4 in hidden places.' in out
    assert '19 images for training, 1 for evaluation of 2 classes' in out
    assert (tmp_path / 'records' / 'labels.txt').read_text() == 'cat\ndog\n'


def test_linked_folders_are_read_once_and_a_link_to_the_folder_itself_ends(tmp_path):
    (tmp_path / 'real').mkdir()
    save(left_and_right(), tmp_path / 'real' / 'a.png')
    photos = tmp_path / 'photos'
    photos.mkdir()
    (photos / 'cat').symlink_to(tmp_path / 'real')
    (photos / 'same').symlink_to(tmp_path / 'real')
    (tmp_path / 'real' / 'again').symlink_to(photos)
    assert [path.relative_to(photos) for path in image_files.find(photos).images] == [pathlib.Path('cat/a.png')]


@pytest.mark.parametrize(
    'start', [b'P1 is a note', b'P3 is', b'BM' + bytes(60), b'II*\0' + bytes(9), b'\x89PNG\r\n\x1a\n']
)
def test_what_only_begins_as_an_image_does_is_counted_or_named(tmp_path, start):
    (tmp_path / 'notes.txt').write_bytes(start)
    save(left_and_right(), tmp_path / 'a.png')
    for path in image_files.find(tmp_path).images:
        if path.name != 'a.png':
            with pytest.raises(image_files.BadImage):
                image_files.square(path, 8, 3)


def test_links_that_lead_nowhere_and_pipes_are_said_and_never_opened(tmp_path):
    save(left_and_right(), tmp_path / 'a.png')
    (tmp_path / 'b.png').symlink_to('moved/b.png')
    os.mkfifo(tmp_path / 'c.png')
    found = image_files.find(tmp_path)
    assert [path.name for path in found.images] == ['a.png']
    assert '2 links that lead nowhere, or pipes' in found.left_out()


def test_a_folder_that_may_not_be_read_is_named_and_no_class_is_lost(tmp_path):
    for label in ('cat', 'dog', 'lost+found'):
        (tmp_path / label).mkdir()
        save(left_and_right(), tmp_path / label / 'a.png')
    (tmp_path / 'lost+found').chmod(0)
    assert without_rights(lambda: len(image_files.find(tmp_path).images)) == '2'
    (tmp_path / 'dog').chmod(0)
    said = without_rights(lambda: len(image_files.find(tmp_path).images))
    for label in ('dog', 'lost+found'):
        (tmp_path / label).chmod(0o700)
    assert said == f'UserError: {tmp_path}/dog: is a folder that cannot be read: Permission denied.'


def test_splits_are_not_taken_for_classes_and_the_folder_that_is_named_works(tmp_path):
    for split in ('train', 'val'):
        (tmp_path / split / 'cat').mkdir(parents=True)
        save(left_and_right(), tmp_path / split / 'cat' / 'a.png')
    with pytest.raises(UserError, match='train, val in it are splits') as raised:
        make_image_records.find_labels(tmp_path, image_files.find(tmp_path).images)
    told = pathlib.Path(str(raised.value).rpartition(': ')[2])
    assert make_image_records.find_labels(told, image_files.find(told).images) == ['cat']


def test_a_few_images_make_a_few_files_whose_names_say_so(tmp_path, capsys):
    (tmp_path / 'photos').mkdir()
    for i in range(21):
        save(left_and_right(), tmp_path / 'photos' / f'{i:02}.png')
    for i in range(8):
        (tmp_path / 'photos' / f'{i:02}.png').write_text('no image')
    words = [str(tmp_path / 'photos'), f'--output={tmp_path / "records"}', '--size=8', '--skip_bad']
    assert make_image_records.main(words) == 2
    assert '13 images are left: it takes 20' in capsys.readouterr().err
    for i in range(30, 37):
        save(left_and_right(), tmp_path / 'photos' / f'{i:02}.png')
    assert make_image_records.main(words) == 0
    assert len(list((tmp_path / 'records').glob('eval-*-of-00001.tfrecord'))) == 1
    assert len(list((tmp_path / 'records').glob('train-*-of-00016.tfrecord'))) == 16
