"""Other people's text: read as it is meant, or named with the place and what to do."""

import bz2
import glob
import gzip
import json
import lzma
import random
import shlex
import subprocess

import pytest
import tensorflow as tf

from ctl.errors import UserError
from tools import make_bert_records as maker
from tools import text_files

TEXT = 'Le café est fermé.\nLa porte est bleue.\n\nUne autre page.\n'
DOCUMENTS = [['Le café est fermé.', 'La porte est bleue.'], ['Une autre page.']]


def read(path):
    return list(text_files.read_documents(str(path)))


@pytest.mark.parametrize(
    'data',
    [
        TEXT.encode(),
        TEXT.encode('utf-8-sig'),
        TEXT.encode('utf-16'),
        b'\xfe\xff' + TEXT.encode('utf-16-be'),
        TEXT.encode('utf-32'),
        TEXT.replace('\n', '\r\n').encode(),
        TEXT.replace('\n', '\r').encode(),
        TEXT.strip().encode(),
        ('\n\n \t\n' + TEXT.replace('\n\n', '\n   \n\n\t\n')).encode(),
        ('  ' + TEXT.replace('\n', '  \n')).encode(),
    ],
)
def test_text_in_any_unicode_with_any_line_ending_is_the_same_documents(tmp_path, data):  # N01
    (tmp_path / 'a.txt').write_bytes(data)
    assert read(tmp_path / 'a.txt') == DOCUMENTS


@pytest.mark.parametrize(
    'data, said',
    [
        (TEXT.encode('latin1'), 'a b.txt: line 1 has the byte 0xe9, which is no UTF-8. Convert it'),
        (b'fine\n' * 6 + TEXT.encode('cp1252'), 'line 7 has the byte 0xe9'),
        (b'fine\n' * 6 + TEXT.replace('é', '’').encode('cp1252'), 'line 7 has the byte 0x92'),
        (TEXT.encode('utf-16-be'), 'line 1 has a zero byte, as text in UTF-16.E has. Convert it, and start again'),
        (TEXT.encode('utf-16-le'), 'line 1 has a zero byte, as text in UTF-16.E has. Convert it, and start again'),
        (TEXT.encode() + b'\0', 'has a zero byte, which text has not. Take such out, and start again'),
        ((TEXT + '\n').encode() * 4 + b'\xed\xa0\x80', 'Most of the others are: leave such out, and start again'),
        (bytes(range(256)) * 9, 'is no text: line 1 has a zero byte'),
        (TEXT.encode('utf-32-le'), 'as text in UTF-32LE has. Convert it, and start again'),
        ('你好世界\n'.encode('gb18030') * 9, 'with what it is in .GB18030, SHIFT_JIS'),
        ('Привет, мир\n'.encode('koi8-r') * 9, 'with what it is in .GB18030'),
        (b'\xff\xfe' + b'odd', 'begins as UTF-16 does, and is none'),
        (gzip.compress(TEXT.encode()), 'is compressed by gzip, and no text: unpack it with gunzip'),
        (bz2.compress(TEXT.encode()), 'is compressed by bzip2'),
        (lzma.compress(TEXT.encode()), 'is compressed by xz'),
        (b'PK\x03\x04rest', 'is a ZIP archive or an office document'),
        (b'%PDF-1.7', 'is a PDF, and no text: make text of it with pdftotext'),
        (b'PAR1\x15rest', 'is a Parquet file, and no text: make text of it'),
        (b'version https://git-lfs.github.com/spec/v1', 'fetch the file with `git lfs pull`'),
        (bytes(257) + b'ustar', 'unpack it with `tar -xf`'),
        (bytes([5, 0, 0, 0, 0, 0, 0, 0, 0xEA, 0xB2, 0x04, 0x3E]), 'is a TFRecord file, and no text'),
    ],
)
def test_what_is_no_unicode_is_named_with_its_place_and_the_way_out(tmp_path, data, said):
    path = tmp_path / 'a b.txt'
    path.write_bytes(data)
    with pytest.raises(UserError, match=said) as raised:
        read(path)
    assert '\n' not in str(raised.value)
    if 'start again' in str(raised.value):
        subprocess.run(str(raised.value).rpartition(': ')[2], shell=True, check=True)
        last = [sentence.replace('’', 'é').strip('\0') for sentence in read(path)[-1]]
        assert last == DOCUMENTS[-1]


def make(text, output, *words):
    return maker.main([f'--text={text}', f'--output={output}', '--vocab_size=200', *words])


def test_text_is_named_as_data_is(tmp_path, capsys, monkeypatch):  # N05
    (tmp_path / 'text' / 'more').mkdir(parents=True)
    for name in 'ab':
        documents = (f'The house {i} is red.\nThe door {i} is blue.' for i in range(60))
        (tmp_path / 'text' / f'{name}.txt').write_text('\n\n'.join(documents))
    (tmp_path / 'text' / 'empty.txt').touch()
    monkeypatch.setenv('HOME', str(tmp_path))
    folder = tmp_path / 'text'
    for number, text in enumerate([f'{folder}/a.txt,{folder}/b.txt', f'{folder}/*', f'{folder}/**', '~/text/*.txt']):
        assert make(text, tmp_path / str(number)) == 0
        assert '240 sentences' in capsys.readouterr().out
    assert make(folder, tmp_path / 'none') == 2
    told = shlex.split(capsys.readouterr().err.rpartition(': ')[2])[0]
    assert make(told, tmp_path / 'told') == 0


def tokens_in(pattern):
    records = tf.data.TFRecordDataset(sorted(glob.glob(pattern))).as_numpy_iterator()
    examples = map(tf.train.Example.FromString, records)
    return sum(sum(example.features.feature['input_mask'].int64_list.value) for example in examples)


def test_of_a_line_that_is_longer_than_a_record_the_rest_is_in_further_records(tmp_path):  # N04
    rng = random.Random(0)
    words = ['alpha', 'beta', 'gamma', 'delta', 'omega', 'sigma', 'kappa', 'theta']
    documents = ('\n'.join(' '.join(rng.choices(words, k=400)) for _ in range(4)) for _ in range(40))
    (tmp_path / 'a.txt').write_text('\n\n'.join(documents))
    assert make(tmp_path / 'a.txt', tmp_path / 'records', '--max_length=32', '--max_predictions=5') == 0
    about = json.loads((tmp_path / 'records' / 'about.json').read_text())
    assert about['tokens'] == 38 * 4 * 400
    # Each of the three passes has nearly all: half of the second segments are from elsewhere, and may be cut.
    assert tokens_in(f'{tmp_path}/records/train-*') > 0.9 * maker.PASSES * about['tokens']


@pytest.mark.parametrize('encoding', ['utf-16-le', 'utf-16-be', 'utf-32-le', 'utf-32-be'])
def test_text_of_any_language_without_a_mark_is_converted_as_told(tmp_path, encoding):
    text = '你好世界。\n再见。\n\nПривет, мир.\n' * 9
    (tmp_path / 'a.txt').write_bytes(text.encode(encoding))
    with pytest.raises(UserError, match='Convert it, and start again') as raised:
        read(tmp_path / '*.txt')
    subprocess.run(str(raised.value).rpartition(': ')[2], shell=True, check=True)
    assert read(tmp_path / '*.txt')[0] == ['你好世界。', '再见。']


def test_only_line_ends_end_a_line(tmp_path):
    """Not the form feeds, separators and next-line characters of which str.splitlines makes lines, too."""
    (tmp_path / 'a.txt').write_text('One\u2028two\x0bthree\x85four\x1cfive.\n\x0cSix.\n', encoding='utf8')
    assert [len(document) for document in read(tmp_path / 'a.txt')] == [2]


@pytest.mark.parametrize('start', ['PAR1 is a county', 'BZh is', 'GIF89 was', 'ARROW1 flies', 'P1 rest'])
def test_text_may_begin_with_the_letters_of_another_kind_of_file(tmp_path, start):
    (tmp_path / 'a.txt').write_text(start)
    assert read(tmp_path / 'a.txt') == [[start]]


def test_a_small_corpus_makes_fewer_files_or_is_told_how_much_it_takes(tmp_path, capsys):  # N03
    documents = [f'The house {i} is red.\nThe door {i} is blue.' for i in range(25)]
    (tmp_path / 'a.txt').write_text('\n\n'.join(documents))
    assert make(tmp_path / 'a.txt', tmp_path / 'records') == 0
    assert [path.name for path in (tmp_path / 'records').glob('eval-*')] == ['eval-00000-of-00001.tfrecord']
    documents[19] = 'Only one.'
    (tmp_path / 'a.txt').write_text('\n\n'.join(documents))
    capsys.readouterr()
    assert make(tmp_path / 'a.txt', tmp_path / 'more') == 2
    assert '40 are always enough' in capsys.readouterr().err
    assert not (tmp_path / 'more').exists()
    (tmp_path / 'a.txt').write_text('\n\n'.join(['Only one.', *(f'And {i} more.' for i in range(39))]))
    assert make(tmp_path / 'a.txt', tmp_path / 'more') == 0  # as it is told


def test_a_document_of_what_has_no_tokens_is_none(tmp_path):
    documents = [f'The house {i} is red.\nThe door {i} is blue.' if i % 3 else '\u200b' for i in range(60)]
    (tmp_path / 'a.txt').write_text('\n\n'.join(documents))
    assert make(tmp_path / 'a.txt', tmp_path / 'records') == 0
