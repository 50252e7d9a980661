"""What is said about records that do not fit the experiment, before the first step and in the middle of a run."""

import numpy as np
import pytest

from tests import bert_records
from tests.bert_records import LENGTH, PREDICTIONS, VOCAB, make_record, write_file
from tests.runs import Workdir, door, overrides, write_data

RNG = np.random.default_rng(0)
DRY = ['--dry_run']


@pytest.fixture
def flags(tmp_path):
    return [*write_data(tmp_path, train_counts=(20, 20)), f'--workdir={tmp_path / "run"}']


def wrong_last_file(tmp_path, **changed):
    """The same wrong record three times, where sound ones were."""
    write_file(tmp_path / 'train-1.tfrecord', [make_record(RNG, **changed)] * 3)


def test_features_of_another_length_are_refused_with_the_setting_that_fits(flags, tmp_path, capsys):  # C19
    wrong_last_file(tmp_path, input_ids=np.full(128, 7), masked_lm_positions=np.zeros(20, int))
    assert door(*flags, *DRY) == 2
    error = capsys.readouterr().err
    assert 'train-1.tfrecord: record 0: feature input_ids has 128 values, expected 16' in error
    assert 'set --config.model.max_length=128' in error


def test_predictions_of_another_length_are_refused(flags, tmp_path, capsys):
    wrong_last_file(tmp_path, masked_lm_ids=np.full(20, 7))
    assert door(*flags, *DRY) == 2
    assert 'masked_lm_ids has 20 values, expected 5: set --config.model.max_predictions=20' in capsys.readouterr().err


def test_a_missing_feature_is_named_with_what_there_is(flags, tmp_path, capsys):
    wrong_last_file(tmp_path, masked_lm_weights=None)
    assert door(*flags, *DRY) == 2
    error = capsys.readouterr().err
    assert 'train-1.tfrecord: record 0 has no feature masked_lm_weights; it has input_ids, input_mask' in error


def test_without_next_sentence_labels_the_error_says_how_to_train_without_them(flags, tmp_path, capsys):  # C20
    for file in ('train-0', 'train-1', 'eval-0', 'eval-1'):
        write_file(tmp_path / f'{file}.tfrecord', [make_record(RNG, next_sentence_labels=None) for _ in range(20)])
    assert door(*flags, *DRY) == 2
    assert '--config.model.next_sentence=false' in capsys.readouterr().err
    assert door(*flags, *DRY, '--config.model.next_sentence=false') == 0


def test_an_id_beyond_the_vocabulary_is_refused_before_the_first_step(flags, tmp_path, capsys):  # C21
    wrong_last_file(tmp_path, input_ids=np.full(LENGTH, VOCAB))
    assert door(*flags, *DRY) == 2
    assert f'record 0: feature input_ids has id {VOCAB}, which is not in [0, model.vocab_size={VOCAB})' in (
        capsys.readouterr().err
    )


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


def test_a_feature_of_another_kind_is_refused(flags, tmp_path, capsys):
    wrong_last_file(tmp_path, masked_lm_weights=np.ones(PREDICTIONS, int))
    assert door(*flags, *DRY) == 2
    assert 'feature masked_lm_weights holds integers, expected floats' in capsys.readouterr().err


def test_something_that_is_no_example_is_refused(flags, tmp_path, capsys):
    import tensorflow as tf

    with tf.io.TFRecordWriter(str(tmp_path / 'train-1.tfrecord')) as writer:
        writer.write(b'\xff\xff not an example')
    assert door(*flags, *DRY) == 2
    assert 'train-1.tfrecord: record 0 is not a tf.train.Example' in capsys.readouterr().err


def test_the_model_gardens_names_are_read_as_well_and_give_the_same_run(tmp_path):
    flags = write_data(tmp_path) + overrides(train__steps=2)
    assert door(*flags, f'--workdir={tmp_path / "classic"}') == 0
    import tensorflow as tf

    for path in tmp_path.glob('*.tfrecord'):
        examples = [tf.train.Example.FromString(r.numpy()) for r in tf.data.TFRecordDataset(str(path))]
        with tf.io.TFRecordWriter(str(path)) as writer:
            for example in examples:
                features = example.features.feature
                for old, new in (('input_ids', 'input_word_ids'), ('segment_ids', 'input_type_ids')):
                    features[new].CopyFrom(features.pop(old))
                writer.write(example.SerializeToString())
    assert door(*flags, f'--workdir={tmp_path / "garden"}') == 0
    classic, garden = Workdir(tmp_path / 'classic'), Workdir(tmp_path / 'garden')
    assert [line['loss'] for line in classic.lines('train')] == [line['loss'] for line in garden.lines('train')]
    assert bert_records.FITTING['model.vocab_size'] == classic.config['model']['vocab_size']
