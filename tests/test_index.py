"""Which records there are, and what is said about files that are not what they should be."""

import gzip
import os
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from ctl.data.index import find_files, load_index
from ctl.errors import UserError
from tests import bert_records


@pytest.fixture
def files(tmp_path):
    bert_records.write_files(tmp_path, [5, 3, 9])
    return find_files(str(tmp_path / 'train-*'), 'data.train')


def test_the_index_counts_every_record_and_reads_any_of_them(files):
    index = load_index(files)
    assert index.counts.tolist() == [5, 3, 9]
    expected = [record for path in files for record in tf.data.TFRecordDataset(path).as_numpy_iterator()]
    assert [index.read(i) for i in range(index.records)] == expected
    assert index.name(7) == f'{files[1]}: record 2'


def test_a_second_start_reads_the_cache_and_a_changed_file_is_indexed_again(files, monkeypatch):
    load_index(files)
    scans = []
    scan = load_index.__globals__['_scan']
    monkeypatch.setitem(load_index.__globals__, '_scan', lambda path: scans.append(path) or scan(path))
    load_index(files)
    assert scans == []
    bert_records.write_file(files[1], [bert_records.make_record(np.random.default_rng(0))] * 4)
    assert load_index(files).counts.tolist() == [5, 4, 9]
    assert scans == [files[1]]


def test_several_globs_are_taken_together_sorted_and_each_file_once(files, tmp_path):
    assert find_files(f'{tmp_path}/train-2*, {tmp_path}/train-*', 'data.train') == sorted(files)


def test_a_glob_without_files_is_refused_with_the_glob():  # C22
    with pytest.raises(UserError, match=r'data.train=nope\*: no file matches'):
        find_files('nope*', 'data.train')


def test_a_file_of_zero_bytes_is_refused_by_name(files, tmp_path):
    (tmp_path / 'train-9.tfrecord').touch()
    with pytest.raises(UserError, match='train-9.tfrecord has 0 bytes'):
        find_files(str(tmp_path / 'train-*'), 'data.train')


def test_a_gzip_file_is_refused_by_name(files, tmp_path):
    (tmp_path / 'train-3.tfrecord').write_bytes(gzip.compress(b'anything'))
    with pytest.raises(UserError, match='train-3.tfrecord is compressed with gzip'):
        find_files(str(tmp_path / 'train-*'), 'data.train')


def test_a_damaged_record_is_named_by_file_and_number(files):  # C23
    offsets = load_index(files).offsets[2]
    data = bytearray(pathlib.Path(files[2]).read_bytes())
    data[offsets[6] + 20] ^= 1
    pathlib.Path(files[2]).write_bytes(data)
    with pytest.raises(UserError, match=r'train-2.tfrecord: record 6 has a wrong checksum'):
        load_index(files)


def test_a_truncated_file_is_named_with_the_record_that_is_cut_off(files):
    os.truncate(files[0], os.path.getsize(files[0]) - 7)
    with pytest.raises(UserError, match=r'train-0.tfrecord: record 4 is cut off'):
        load_index(files)


def test_a_file_that_holds_no_records_is_refused(tmp_path):
    (tmp_path / 'notes.txt').write_text('these are not records, whatever their name says')
    with pytest.raises(UserError, match='notes.txt: record 0 .* Is it a TFRecord file'):
        load_index([str(tmp_path / 'notes.txt')])
