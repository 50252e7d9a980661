"""What is said about records that do not fit the experiment, before the first step and in the middle of a run."""

import io

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from ctl.config import base_config
from ctl.data import pipeline, records
from ctl.data.bad_records import BadRecords
from ctl.data.index import load_index
from ctl.data.inputs import make_layout
from ctl.errors import UserError
from ctl.experiment import BATCH_NAMES, Experiment, Feature
from ctl.paths import find_files
from experiments import bert_mlm
from tests import bert_records
from tests.bert_records import LENGTH, PREDICTIONS, VOCAB, make_record, write_file
from tests.runs import door, overrides, write_shallow

RNG = np.random.default_rng(0)


@pytest.fixture
def flags(tmp_path):
    return [*write_shallow(tmp_path, train_counts=(20, 20)), f'--workdir={tmp_path / "run"}']


def make_source(folder, **model):
    """The training records in `folder` as bert_mlm sees them, as every start of a run makes it."""
    config = bert_mlm.get_config()
    for key, value in {**bert_records.FITTING, **{f'model.{key}': value for key, value in model.items()}}.items():
        config.model[key.removeprefix('model.')] = value
    experiment = Experiment(bert_mlm.make_features(config.model), {}, [])
    index = load_index(find_files(str(folder / 'train-*'), 'data.train'))
    return records.make_source(index, experiment, BadRecords(config.data, print)), config


def refused(folder):
    """What is said of records in `folder` that do not fit."""
    with pytest.raises(UserError) as error:
        make_source(folder)
    assert '\n' not in str(error.value)
    return str(error.value)


def wrong_last_file(tmp_path, **changed):
    """The same wrong record three times, where sound ones were."""
    write_file(tmp_path / 'train-1.tfrecord', [make_record(RNG, **changed)] * 3)


def test_features_of_another_length_are_refused_with_the_setting_that_fits(flags, tmp_path, capsys):  # C19
    longer = {name: np.zeros(24, int) for name in ('input_ids', 'input_mask', 'segment_ids')}
    longer |= {name: np.zeros(7, int) for name in ('masked_lm_positions', 'masked_lm_ids')}
    for file in ('train-0', 'train-1', 'eval-0', 'eval-1'):
        changed = {**longer, 'masked_lm_weights': np.ones(7, np.float32)}
        write_file(tmp_path / f'{file}.tfrecord', [make_record(RNG, **changed) for _ in range(20)])
    told = []
    for setting in ('model.max_length=24', 'model.max_predictions=7'):
        assert door(*flags, *told, '--dry_run') == 2
        error = capsys.readouterr().err
        assert 'train-0.tfrecord: record 0: feature' in error and f'set --config.{setting}.' in error
        told.append(f'--config.{setting}')
    assert door(*flags, *told, '--dry_run') == 0


def test_a_record_of_another_length_than_those_before_it_is_not_to_be_set_right(flags, tmp_path):
    wrong_last_file(tmp_path, masked_lm_ids=np.full(20, 7))
    assert refused(tmp_path).endswith(
        'train-1.tfrecord: record 0: feature masked_lm_ids has 20 values, expected 5 as the records before it have. '
        'Make the records again, with one for all.'
    )


def test_records_without_features_are_said_to_have_none(flags, tmp_path, capsys):  # N15
    for file in ('train-0', 'train-1'):
        write_file(tmp_path / f'{file}.tfrecord', [{}] * 20)
    assert door(*flags, '--dry_run') == 2
    assert 'record 0 has no feature input_ids or input_word_ids; it has none.' in capsys.readouterr().err


def test_a_number_beyond_int32_is_refused_and_does_not_wrap_around(tmp_path):
    """Deep in the files as well, where no record is looked at before the first step."""
    features = {'number': Feature(())}
    for place in (0, 150):
        records_of = [{'number': np.array([2**31 + 5 if i == place else i])} for i in range(200)]
        write_file(tmp_path / 'train-0', records_of)
        index = load_index([str(tmp_path / 'train-0')])
        with pytest.raises(UserError, match=f'record {place}: feature number has 2147483653, which is beyond int32'):
            source = records.make_source(index, Experiment(features, {}, []), BadRecords(base_config().data, print))
            config = base_config(train=dict(global_batch_size=8))
            layout = make_layout(index, config, 1, 'file')
            with records.explained(source):
                dataset = pipeline.make_train_dataset_fn(source, layout, 0)(tf.distribute.InputContext())
                list(dataset.take(25))


@pytest.mark.parametrize('name', BATCH_NAMES)
def test_a_feature_with_a_name_of_ctls_is_refused(name):
    with pytest.raises(UserError, match=f'features: {name} is a name of what ctl puts into every batch'):
        Experiment({name: Feature(())}, {}, [])


@pytest.mark.parametrize(
    'make, said',
    [
        ({'exif': 6}, 'is to be turned, by its EXIF, and training sees it as it is stored'),
        ({'animated': True}, 'is an animation, and training sees the first picture'),
        ({'mode': 'I;16'}, 'has 16 bits, and training sees 8'),
        ({'mode': 'RGBA'}, 'is transparent in parts, and training sees what is beneath'),
        ({}, ''),
    ],
)
def test_an_image_that_training_sees_otherwise_than_a_person_is_named_once(tmp_path, make, said):
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x112] = make.get('exif', 1)
    more = {'save_all': True, 'append_images': [Image.new('RGB', (8, 8), 'red')]} if 'animated' in make else {}
    image = Image.new(make.get('mode', 'RGB'), (8, 8))
    image.save(file, 'GIF' if more else 'PNG', **({'exif': exif} if 'exif' in make else {}), **more)
    write_file(tmp_path / 'train-0', [{'image': file.getvalue()}] * 20)
    heard, features = [], {'image': Feature((8, 8, 3), 'image')}
    index = load_index([str(tmp_path / 'train-0')])
    records.make_source(index, Experiment(features, {}, []), BadRecords(base_config().data, heard.append))
    where = f'{tmp_path}/train-0: record 0: feature image'
    assert bool(heard) == bool(said)
    if said:
        assert heard[0].startswith(f'WARNING: {where} {said}. Of those looked at, 19 more') and len(heard) == 1


def test_images_that_no_setting_fits_are_told_which_tool_makes_some(tmp_path, capsys):  # N13
    for split in ('train', 'eval'):
        images = [{'image/encoded': tf.io.encode_png(np.zeros((50 + i, 40, 3), np.uint8)).numpy()} for i in range(20)]
        write_file(tmp_path / f'{split}-0', images)
    words = ['--experiment=gan_images', *overrides(data__train=f'{tmp_path}/train*', data__eval=f'{tmp_path}/eval*')]
    assert door(*words, '--dry_run') == 2
    error = capsys.readouterr().err
    assert 'is an image of 50x40 pixels, expected 64x64. gan_images trains on squares of 8, 16, 32, 64, 128' in error
    assert 'tools.make_image_records FOLDER --output=records' in error and 'set --config' not in error
    for split in ('train', 'eval'):
        write_file(tmp_path / f'{split}-0', [{'image': tf.io.encode_png(np.zeros((8, 8, 3), np.uint8)).numpy()}] * 20)
    assert door(*words, '--dry_run') == 2
    assert 'set --config.model.size=8.' in capsys.readouterr().err


def test_a_missing_feature_is_named_with_what_there_is(flags, tmp_path):
    wrong_last_file(tmp_path, masked_lm_weights=None)
    said = refused(tmp_path)
    assert 'train-1.tfrecord: record 0 has no feature masked_lm_weights; it has input_ids, input_mask' in said


def test_without_next_sentence_labels_the_error_says_how_to_train_without_them(flags, tmp_path):  # C20
    for file in ('train-0', 'train-1'):
        write_file(tmp_path / f'{file}.tfrecord', [make_record(RNG, next_sentence_labels=None) for _ in range(20)])
    assert '--config.model.next_sentence=false' in refused(tmp_path)
    make_source(tmp_path, next_sentence=False)


def test_an_id_beyond_the_vocabulary_is_refused_before_the_first_step(flags, tmp_path):  # C21
    wrong_last_file(tmp_path, input_ids=np.full(LENGTH, VOCAB))
    said = refused(tmp_path)
    assert f'record 0: feature input_ids has id {VOCAB}, which is not in [0, model.vocab_size={VOCAB})' in said


@pytest.mark.slow  # tests/test_bad_records.py has more kinds
@pytest.mark.parametrize(
    'changed, said',
    [
        (dict(masked_lm_ids=np.full(PREDICTIONS, VOCAB + 3)), f'has id {VOCAB + 3}, which is not in'),
        (dict(input_ids=np.full(LENGTH, -1)), 'has id -1, which is not in'),
        (dict(input_mask=np.ones(9, int)), 'input_mask has 9 values, expected 16'),
        (dict(segment_ids=None), 'has no feature segment_ids'),
    ],
)
def test_a_wrong_record_deep_in_a_file_stops_the_run_by_name(flags, tmp_path, capsys, changed, said):  # C21, C23
    """Beyond the records that are looked at before the first step."""
    sound = [make_record(RNG) for _ in range(40)]
    write_file(tmp_path / 'train-1.tfrecord', [*sound, make_record(RNG, **changed)])
    assert door(*flags, *overrides(train__steps=30)) == 2
    error = capsys.readouterr().err.strip()
    assert error.count('\n') == 0
    assert 'train-1.tfrecord: record 40' in error and said in error


def test_a_feature_of_another_kind_is_refused(flags, tmp_path):
    wrong_last_file(tmp_path, masked_lm_weights=np.ones(PREDICTIONS, int))
    assert 'feature masked_lm_weights holds integers, expected floats' in refused(tmp_path)


def test_something_that_is_no_example_is_refused(flags, tmp_path):
    with tf.io.TFRecordWriter(str(tmp_path / 'train-1.tfrecord')) as writer:
        writer.write(b'\xff\xff not an example')
    assert 'train-1.tfrecord: record 0 is not a tf.train.Example' in refused(tmp_path)


def test_the_model_gardens_names_are_read_as_well_and_give_the_same_batches(flags, tmp_path):
    def batches():
        source, config = make_source(tmp_path)
        config.train.global_batch_size = 8
        layout = make_layout(source.index, config, 2, 'file')
        dataset = pipeline.make_train_dataset_fn(source, layout, 0)(tf.distribute.InputContext())
        return source.names, list(dataset.take(10).as_numpy_iterator())

    names, classic = batches()
    assert set(names.values()) == set(names)
    for path in tmp_path.glob('*.tfrecord'):
        examples = [tf.train.Example.FromString(r.numpy()) for r in tf.data.TFRecordDataset(str(path))]
        with tf.io.TFRecordWriter(str(path)) as writer:
            for example in examples:
                features = example.features.feature
                for old, new in (('input_ids', 'input_word_ids'), ('segment_ids', 'input_type_ids')):
                    features[new].CopyFrom(features.pop(old))
                writer.write(example.SerializeToString())
    names, garden = batches()
    assert names['input_ids'] == 'input_word_ids' and names['segment_ids'] == 'input_type_ids'
    for one, other in zip(classic, garden, strict=True):
        assert one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
