"""Records from text: what is masked, which pairs are labelled, and that default data appears whole or not at all."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from ctl import cache
from tools import make_bert_records as maker

token_documents = st.lists(
    st.lists(st.lists(st.integers(5, 99), min_size=1, max_size=20), min_size=1, max_size=6), min_size=1, max_size=5
)


@given(token_documents, st.integers(8, 40), st.integers(1, 8), st.integers(0, 100))
@settings(max_examples=200, deadline=None)
def test_every_instance_is_what_bert_expects(documents, max_length, max_predictions, seed):
    every = [token for document in documents for sentence in document for token in sentence]
    instances = maker.make_instances(documents, np.random.default_rng(seed), 100, max_length, max_predictions)
    for x in instances:
        length = x['input_mask'].sum()
        assert {len(x[k]) for k in ('input_ids', 'input_mask', 'segment_ids')} == {max_length}
        assert {len(x[k]) for k in x if k.startswith('masked_lm')} == {max_predictions}
        n = int(x['masked_lm_weights'].sum())
        assert 1 <= n <= max_predictions
        ids = x['input_ids'].copy()
        ids[x['masked_lm_positions'][:n]] = x['masked_lm_ids'][:n]
        assert ids[0] == maker.CLASS and ids[length - 1] == maker.SEPARATOR and not ids[length:].any()
        assert (ids == maker.SEPARATOR).sum() == 2
        assert set(ids[:length]) - {maker.CLASS, maker.SEPARATOR} <= set(every)
        ends = np.flatnonzero(ids == maker.SEPARATOR)
        assert np.array_equal(np.flatnonzero(x['segment_ids']), np.arange(ends[0] + 1, ends[1] + 1))
        assert x['next_sentence_labels'][0] in ([0, 1] if len(documents) > 1 else [0])  # C49


def test_of_the_masked_tokens_80_percent_are_masked_10_replaced_and_10_kept():
    rng = np.random.default_rng(0)
    documents = [[rng.integers(5, 1000, 30).tolist() for _ in range(50)] for _ in range(40)]
    kinds = []
    for x in maker.make_instances(documents, rng, 1000, 64, 10):
        counted = x['masked_lm_weights'] > 0
        seen, targets = x['input_ids'][x['masked_lm_positions']][counted], x['masked_lm_ids'][counted]
        kinds += np.where(seen == maker.MASK, 0, np.where(seen == targets, 2, 1)).tolist()
    assert np.bincount(kinds) / len(kinds) == pytest.approx(np.array([0.8, 0.1, 0.1]), abs=0.02)


def test_the_unigram_loss_is_the_cross_entropy_of_the_training_frequencies():
    evaluation = [{'masked_lm_ids': np.array([1, 2, 0]), 'masked_lm_weights': np.array([1.0, 1, 0])}]
    # Counts 0, 3, 1 and one more each: 1/7, 4/7, 2/7.
    assert maker.unigram_loss([[[1, 1], [1, 2]]], evaluation, 3) == pytest.approx(-np.log([4 / 7, 2 / 7]).mean())


def test_written_records_are_dealt_evenly_and_held_out_documents_are_not_trained_on(tmp_path):
    documents = [[f'Document {i} says that word{i} is here.', f'It says word{i} again.'] for i in range(60)]
    maker.write_records(documents, tmp_path / 'records', 200, 32, 5)
    counts = [sum(1 for _ in tf.data.TFRecordDataset(str(p))) for p in sorted((tmp_path / 'records').glob('train*'))]
    assert len(counts) == maker.TRAIN_FILES and max(counts) - min(counts) <= 1
    assert (tmp_path / 'records' / 'vocab.txt').read_text().splitlines()[:5] == maker.SPECIAL_TOKENS


def test_prose_is_told_from_code():
    assert maker._looks_like_prose('Computes the mean of elements across dimensions of a tensor.')
    assert not maker._looks_like_prose('x = tf.constant([[1., 1.], [2., 2.]]); y = x[0] + f(x)[1:2]')


def test_a_maker_that_dies_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), cache.appears_whole(tmp_path / 'data') as scratch:
        scratch.mkdir()
        (scratch / 'half').write_text('half')
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_two_makers_at_once_leave_one_whole_folder(tmp_path):
    with cache.appears_whole(tmp_path / 'data') as first:
        first.mkdir()
        (first / 'who').write_text('first')
        with cache.appears_whole(tmp_path / 'data') as second:
            second.mkdir()
            (second / 'who').write_text('second')
    assert [p.name for p in tmp_path.iterdir()] == ['data']
    assert (tmp_path / 'data' / 'who').read_text() == 'second'
