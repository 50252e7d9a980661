"""Images of a folder as records, and what is said of those that are none."""

import numpy as np
import pytest
import tensorflow as tf

from ctl.config import base_config
from ctl.data import records
from ctl.data.bad_records import BadRecords
from ctl.data.index import load_index
from ctl.experiment import Feature, unchanged
from ctl.paths import find_files
from tests.runs import Workdir, door, overrides, printed_after, words_for_the_door
from tools import make_image_records


def write_images(folder, count=40, labels=('cat', 'dog'), size=(20, 30)):
    """PNG and JPEG by turns: red ones of the first label, green of the second."""
    rng = np.random.default_rng(0)
    for i in range(count):
        label = i % len(labels) if labels else 0
        pixels = rng.integers(0, 50, (*size, 3))
        pixels[..., label] += 200
        encode, suffix = (tf.io.encode_png, 'png') if i % 4 < 2 else (tf.io.encode_jpeg, 'JPG')
        path = folder / (labels[label] if labels else '') / f'{i}.{suffix}'
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(tf.constant(pixels, tf.uint8)).numpy())


def read(output, split):
    index = load_index(find_files(f'{output}/{split}-*', 'files'))
    return [tf.train.Example.FromString(index.read(record)).features.feature for record in range(index.records)]


def test_images_become_records_with_labels_from_their_folders_and_the_printed_command_could_train(tmp_path, capsys):
    write_images(tmp_path / 'photos')
    words = [str(tmp_path / 'photos'), f'--output={tmp_path / "records"}', '--size=16']
    assert make_image_records.main(words) == 0
    out = capsys.readouterr().out
    assert '38 images for training, 2 for evaluation of 2 classes' in out
    assert (tmp_path / 'records' / 'labels.txt').read_text() == 'cat\ndog\n'
    records = read(tmp_path / 'records', 'train')
    for features in records:
        image = tf.io.decode_png(features['image'].bytes_list.value[0]).numpy()
        assert image.shape == (16, 16, 3)
        assert image.mean((0, 1)).argmax() == features['label'].int64_list.value[0]
    assert len(records) == 38
    small = overrides(train__global_batch_size=4, model__generator_width=4, model__discriminator_width=4)
    words = words_for_the_door(printed_after('Train on them with:\n', out))
    assert door(*words, *small, f'--workdir={tmp_path / "run"}', '--dry_run') == 0


def test_images_without_folders_have_no_labels_and_grey_ones_one_channel(tmp_path, capsys):
    write_images(tmp_path / 'photos', labels=())
    words = [str(tmp_path / 'photos'), f'--output={tmp_path / "records"}', '--size=8', '--channels=1']
    assert make_image_records.main(words) == 0
    assert '--config.model.classes=0' in capsys.readouterr().out
    first = read(tmp_path / 'records', 'eval')[0]
    assert set(first) == {'image'}
    assert tf.io.decode_png(first['image'].bytes_list.value[0]).shape == (8, 8, 1)


def test_the_same_folder_makes_the_same_records(tmp_path):
    write_images(tmp_path / 'photos')
    for name in ('one', 'two'):
        assert make_image_records.main([str(tmp_path / 'photos'), f'--output={tmp_path / name}', '--size=8']) == 0
    for path in sorted((tmp_path / 'one').glob('*.tfrecord')):
        assert path.read_bytes() == (tmp_path / 'two' / path.name).read_bytes()


def test_a_file_that_is_no_image_is_named_and_may_be_left_out(tmp_path, capsys):
    write_images(tmp_path / 'photos')
    bad = tmp_path / 'photos' / 'cat' / 'bad.png'
    bad.write_bytes(b'no image')
    words = [str(tmp_path / 'photos'), f'--output={tmp_path / "records"}', '--size=8']
    assert make_image_records.main(words) == 2
    error = capsys.readouterr().err.strip()
    assert error == f'error: {bad}: is no image. Remove it, or leave such out: --skip_bad.'
    assert not (tmp_path / 'records').exists()
    assert make_image_records.main([*words, '--skip_bad']) == 0
    assert f'left out: {bad}: is no image.' in capsys.readouterr().out
    assert len(read(tmp_path / 'records', 'train')) == 38


@pytest.mark.parametrize(
    'make, words, said',
    [
        (lambda folder: None, [], 'is no folder'),
        (lambda folder: write_images(folder, 5), [], 'has 5 images; it takes 20'),
        (lambda folder: write_images(folder), ['--size=48'], '--size=48: take one of 8, 16, 32, 64, 128'),
        (lambda folder: write_images(folder), ['--channels=2'], '--channels=2: take 3 for colour'),
        (lambda folder: (write_images(folder), write_images(folder, 1, ())), [], 'lies beside subfolders'),
        (lambda folder: write_images(folder), ['--sise=4'], 'sise'),
    ],
)
def test_what_cannot_be_made_is_refused_in_one_line(tmp_path, capsys, make, words, said):
    make(tmp_path / 'photos')
    assert make_image_records.main([str(tmp_path / 'photos'), f'--output={tmp_path / "records"}', *words]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and '\n' not in error


def make_bad(folder, where, size=None):
    """Records of made-up images, of which one is cut off, or of another size."""
    from tests import image_records
    from tools import record_files

    flags = image_records.write_data(folder, train=400)
    images = image_records.make_images(400)
    other = images[where]['image'][:40] if size is None else tf.io.encode_png(np.zeros(size, np.uint8)).numpy()
    images[where]['image'] = other
    record_files.write(folder, 'train', 4, images)
    return flags


@pytest.mark.parametrize(
    'size, said',
    [
        (None, 'holds 40 bytes that are no PNG or JPEG'),
        pytest.param((9, 8, 1), 'is an image of 9x8 pixels', marks=pytest.mark.slow),
    ],
)
def test_an_image_that_is_broken_deep_in_the_files_stops_the_run_and_is_named(tmp_path, capsys, size, said):
    """Number 200 is record 50 of the first file, beyond what is looked at before the first step."""
    flags = make_bad(tmp_path, 200, size)
    assert door(*flags, '--config.train.steps=60', f'--workdir={tmp_path / "run"}') == 2
    captured = capsys.readouterr()
    error = captured.err.strip()
    assert f'train-00000-of-00004.tfrecord: record 50: feature image {said}' in error
    assert '\n' not in error
    assert captured.out.count('looking for it in all 400 records') == 1


def test_an_error_that_is_not_of_the_records_images_looks_at_no_record(tmp_path, capsys):
    """Though it were an image that a model decodes, and a record were wrong."""
    make_bad(tmp_path, 200)
    index = load_index(find_files(str(tmp_path / 'train*'), 'data.train'))
    features = {'image': Feature((8, 8, 1), 'image')}
    source = records.Source(index, features, {'image': 'image'}, unchanged, BadRecords(base_config().data, print))
    fails = tf.function(lambda: tf.io.decode_image('none'))
    with pytest.raises(tf.errors.InvalidArgumentError), records.explained(source):
        fails()
    assert capsys.readouterr().out == ''


@pytest.mark.slow
def test_an_image_that_is_broken_is_skipped_on_request_with_weight_0(tmp_path, capsys):
    flags = [*make_bad(tmp_path, 200), '--config.data.on_bad_record=skip']
    assert door(*flags, '--config.train.steps=60', f'--workdir={tmp_path / "run"}') == 0
    assert 'record 50: feature image holds 40 bytes' in capsys.readouterr().out.replace(
        'record 50 feature', 'record 50: feature'
    )
    assert Workdir(tmp_path / 'run').lines('train')[-1]['skipped_examples'] == 1


def test_inceptions_weights_that_are_none_are_refused_by_name(tmp_path, capsys):
    from tests import image_records

    (tmp_path / 'weights.h5').write_bytes(b'none')
    flags = image_records.write_data(tmp_path, model__inception_weights=tmp_path / 'weights.h5')
    assert door(*flags, f'--workdir={tmp_path / "run"}') == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith(f'error: model.inception_weights={tmp_path / "weights.h5"}: ') and '\n' not in error


@pytest.mark.slow
def test_distances_are_measured_over_inceptions_features_from_a_local_file(tmp_path):
    import keras

    from tests import image_records

    keras.applications.InceptionV3(include_top=False, weights=None, pooling='avg').save_weights(
        str(tmp_path / 'inception.weights.h5')
    )
    flags = image_records.write_data(
        tmp_path, train__steps=1, model__inception_weights=tmp_path / 'inception.weights.h5'
    )
    assert door(*flags, f'--workdir={tmp_path / "run"}') == 0
    assert Workdir(tmp_path / 'run').lines('eval')[-1]['frechet_distance'] > 0
