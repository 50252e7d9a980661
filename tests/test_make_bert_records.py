"""Records from text: what is masked, which pairs are labelled, and that default data appears whole or not at all."""

import errno
import glob
import os
import pathlib
import re

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from ctl.errors import GuardError, UserError
from ctl.files import appears_whole
from experiments import bert_mlm
from tests.runs import Workdir, door, overrides, printed_after, words_for_the_door
from tools import make_bert_records as maker

ROOT = pathlib.Path(__file__).resolve().parent.parent

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


def test_the_same_text_gives_the_same_vocabulary(tmp_path):
    rng = np.random.default_rng(0)
    words = [''.join(rng.choice(list('abcdefgh'), 4)) for _ in range(200)]
    for folder in ('one', 'two', 'three'):
        (tmp_path / folder).mkdir()
        maker.learn_vocabulary([' '.join(words)] * 2, tmp_path / folder, 120)
    texts = [(tmp_path / folder / 'vocab.txt').read_text() for folder in ('one', 'two', 'three')]
    assert texts[0] == texts[1] == texts[2]
    assert len(texts[0].splitlines()) == 120


def test_a_vocabulary_smaller_than_the_alphabet_is_refused(tmp_path):
    with pytest.raises(UserError, match='vocab_size=20 is too small: single characters take 57'):
        maker.learn_vocabulary(['abcdefghijklmnopqrstuvwxyz'], tmp_path, 20)


def test_prose_is_told_from_code():
    assert maker._looks_like_prose('Computes the mean of elements across dimensions of a tensor.')
    assert not maker._looks_like_prose('x = tf.constant([[1., 1.], [2., 2.]]); y = x[0] + f(x)[1:2]')


def test_a_maker_that_dies_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), appears_whole(tmp_path / 'data') as scratch:
        scratch.mkdir()
        (scratch / 'half').write_text('half')
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    'error',
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        tf.errors.ResourceExhaustedError(None, None, 'records/a; No space left on device'),
        Exception('No space left on device (os error 28)'),  # of tokenizers
    ],
)
def test_a_full_disk_is_one_line_whichever_library_meets_it(tmp_path, error):
    full = pytest.raises(GuardError, match='data cannot be written: the disk is full')
    with full, appears_whole(tmp_path / 'data') as scratch:
        scratch.mkdir()
        raise error
    assert list(tmp_path.iterdir()) == []


def test_two_makers_at_once_leave_one_whole_folder(tmp_path):
    with appears_whole(tmp_path / 'data') as first:
        first.mkdir()
        (first / 'who').write_text('first')
        with appears_whole(tmp_path / 'data') as second:
            second.mkdir()
            (second / 'who').write_text('second')
    assert [p.name for p in tmp_path.iterdir()] == ['data']
    assert (tmp_path / 'data' / 'who').read_text() == 'second'


def make(tmp_path, text, *words):
    (tmp_path / 'text.txt').write_text(text)
    return maker.main([f'--output={tmp_path / "records"}', *words])


def test_records_made_from_text_by_the_command_train_with_the_command_it_prints(tmp_path, capsys):
    text = '\n\n'.join(f'The house number {i} is red.\nThe door of house {i} is blue.' for i in range(100))
    words = [f'--text={tmp_path}/*.txt', '--vocab_size=200', '--max_length=24', '--max_predictions=2']
    assert make(tmp_path, text, *words) == 0
    out = capsys.readouterr().out
    assert 'warning: --max_predictions=2 cuts off masking: full records want 4' in out  # C50
    words = words_for_the_door(printed_after('Train on them with:\n', out))
    small = overrides(train__steps=2, model__layers=1, model__width=16, model__heads=2, train__global_batch_size=8)
    assert door(*words, *small, f'--workdir={tmp_path / "run"}') == 0


def test_text_with_a_blank_line_between_all_sentences_is_warned_about(tmp_path, capsys):  # C48
    make(tmp_path, '\n\n'.join(f'Sentence {i}.' for i in range(40)), f'--text={tmp_path}/*.txt', '--vocab_size=99')
    assert 'warning: most documents are one sentence' in capsys.readouterr().out


@pytest.mark.parametrize(
    'words, said',
    [(['--text=nope*'], '--text=nope*: no file matches'), (['--text={}/*.txt'], 'documents found: 1. It takes 20')],
)
def test_text_that_cannot_be_used_is_refused_in_one_line(tmp_path, capsys, words, said):
    assert make(tmp_path, 'One sentence.', *[word.format(tmp_path) for word in words]) == 2
    error = capsys.readouterr().err
    assert error.startswith('error: ') and said in error and error.count('\n') == 1
    assert not (tmp_path / 'records').exists()


@pytest.mark.slow
def test_without_data_the_experiment_trains_on_docstrings_and_says_what_to_beat(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(maker, 'MOST_CHARACTERS', 60_000)
    words = [
        '--experiment=bert_mlm',
        '--config.train.steps=2',
        '--config.model.layers=1',
        '--config.model.vocab_size=500',
        *overrides(model__width=16, model__heads=2),
    ]
    assert door(*words, f'--workdir={tmp_path / "one"}') == 0
    out = capsys.readouterr().out
    assert out.startswith('Making training data from the docstrings of keras ')
    assert re.search(
        r'masked_lm_loss +\d\.\d+ +\(always predicting the unigram distribution of the training tokens: \d', out
    )
    data = Workdir(tmp_path / 'one').config['data']
    assert len(glob.glob(data['train'])) == maker.TRAIN_FILES and len(glob.glob(data['eval'])) == maker.EVAL_FILES
    assert data['train'].startswith(os.environ['XDG_CACHE_HOME'])

    # Made once, and others for other settings.
    said, config = [], bert_mlm.get_config()
    config.model.vocab_size = 500
    assert bert_mlm.make_default_data(config, said.append).train == data['train'] and not said
    config.model.max_length = 32
    assert bert_mlm.make_default_data(config, said.append).train != data['train'] and said
