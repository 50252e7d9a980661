"""What is said about records that do not fit the experiment, before the first step and in the middle of a run."""

import numpy as np
import pytest
import tensorflow as tf

from ctl.data import pipeline, records
from ctl.data.bad_records import BadRecords
from ctl.data.index import find_files, load_index
from ctl.data.inputs import make_layout
from ctl.errors import UserError
from ctl.experiment import Experiment
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
    wrong_last_file(tmp_path, input_ids=np.full(128, 7), masked_lm_positions=np.zeros(20, int))
    assert door(*flags, '--dry_run') == 2
    error = capsys.readouterr().err
    assert 'train-1.tfrecord: record 0: feature input_ids has 128 values, expected 16' in error
    assert 'set --config.model.max_length=128' in error


def test_predictions_of_another_length_are_refused(flags, tmp_path):
    wrong_last_file(tmp_path, masked_lm_ids=np.full(20, 7))
    assert 'masked_lm_ids has 20 values, expected 5: set --config.model.max_predictions=20' in refused(tmp_path)


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
