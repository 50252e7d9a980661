"""Which records there are, what is remembered of them, and what is said about files that are not as they should be."""

import dataclasses
import io
import os
import pathlib
import shutil

import numpy as np
import pytest
import rich.console
import tensorflow as tf

from ctl.data import index as index_module
from ctl.data import scan, tables
from ctl.data.index import load_index
from ctl.data.scan import FileRecords
from ctl.errors import Interrupted, UserError
from ctl.paths import find_files
from tests import bert_records
from tools import index_records


@pytest.fixture
def files(tmp_path):
    bert_records.write_files(tmp_path, [5, 3, 9], compression=('', 'GZIP', 'ZLIB'))
    return find_files(str(tmp_path / 'train-*'), 'data.train')


@pytest.fixture
def scans(monkeypatch):
    """The paths that are scanned from now on."""
    scanned, scan = [], load_index.__globals__['scan']
    monkeypatch.setitem(load_index.__globals__, 'scan', lambda path, *rest: scanned.append(path) or scan(path, *rest))
    return scanned


def hurt(path, place):
    """Flips a bit of one byte of a file."""
    data = bytearray(pathlib.Path(path).read_bytes())
    data[place] ^= 1
    pathlib.Path(path).write_bytes(data)


def test_the_index_counts_every_record_and_reads_any_of_them(files):  # C24
    index = load_index(files)
    assert index.counts.tolist() == [5, 3, 9]
    expected = [
        record
        for path, compression in zip(files, ('', 'GZIP', 'ZLIB'), strict=True)
        for record in tf.data.TFRecordDataset(path, compression).as_numpy_iterator()
    ]
    assert [index.read(i) for i in range(index.records)] == expected
    assert index.name(7) == f'{files[1]}: record 2'


def test_numbers_of_records_count_the_damaged_ones_and_the_places_are_right(files):
    before = load_index(files)
    records = [before.read(i) for i in range(5)]
    hurt(files[0], int(before.starts[1]) + 20)
    hurt(files[0], int(before.starts[3]) + 20)
    index = load_index(files)
    assert [index.read(i) for i in range(3)] == [records[0], records[2], records[4]]
    assert [index.name(i) for i in range(4)] == [
        *(f'{files[0]}: record {number}' for number in (0, 2, 4)),
        f'{files[1]}: record 0',
    ]
    assert index.breaks.tolist() == [1, 2]
    assert [(path, damage.number) for path, damage in index.damaged] == [(files[0], 1), (files[0], 3)]


def test_a_second_start_reads_the_cache_and_a_changed_file_is_indexed_again(files, scans):
    load_index(files)
    assert sorted(scans) == files
    scans.clear()
    assert load_index(files).counts.tolist() == [5, 3, 9]
    assert scans == []
    bert_records.write_file(pathlib.Path(files[1]), [bert_records.make_record(np.random.default_rng(0))] * 4)
    assert load_index(files).counts.tolist() == [5, 4, 9]
    assert scans == [files[1]]


def test_what_was_read_before_a_bad_file_was_met_is_not_read_again(files, scans):
    (pathlib.Path(files[0]).parent / 'zz').write_text('text')
    with pytest.raises(UserError, match='zz: it is text'):
        load_index([*files, str(pathlib.Path(files[0]).parent / 'zz')])
    scans.clear()
    load_index(files)
    assert not scans


def test_who_is_asked_to_end_while_files_are_read_ends_soon_and_keeps_what_was_read(files, scans, monkeypatch):
    """The last file is read for ever: a hole, and a look that comes back to its start."""
    monkeypatch.setattr(index_module, 'CHECK_SECONDS', 0.01)
    with open(files[2], 'wb') as file:
        file.truncate(1 << 40)
    asked = []

    def check():
        asked.append(1)
        if len(scans) == 3 and len(asked) > 100:
            raise Interrupted('SIGTERM received')

    with pytest.raises(Interrupted):
        load_index(files, check=check)
    scans.clear()
    load_index(files[:2])
    assert not scans


def test_a_file_that_goes_while_it_is_read_is_said(files, monkeypatch):
    def read(path, *arguments):
        os.remove(path)
        return real(path, *arguments)

    real = scan._read_sound
    monkeypatch.setattr(scan, '_read_sound', read)
    with pytest.raises(UserError, match='cannot be read: it is gone'):
        load_index(files[:1])


def test_a_start_with_some_files_of_a_folder_keeps_what_is_known_of_the_others(files, scans):
    load_index(files[:2])
    load_index(files[2:])
    scans.clear()
    load_index(files)
    assert scans == []


def damage_table(table, how):
    if how == 'a folder':
        table.unlink()
        (table / 'inside').mkdir(parents=True)
        return
    if how == 'fields of another kind':
        np.savez(table, about=np.frombuffer(b'{"version": 1, "files": [{}]}', np.uint8), sizes=np.zeros(3, np.uint32))
        return
    whole = table.read_bytes()
    table.write_bytes(
        {
            '0 bytes': b'',
            'half': whole[: len(whole) // 2],
            'noise': np.random.default_rng(0).bytes(999),
            'a changed byte': whole[:-2000] + b'?' + whole[-1999:],
            'text': b'here was an index',
        }[how]
    )


@pytest.fixture
def console():
    return rich.console.Console(file=io.StringIO(), width=10_000)


DAMAGE = ['0 bytes', 'half', 'noise', 'text', 'a changed byte', 'a folder', 'fields of another kind']


@pytest.mark.parametrize('how', DAMAGE)
def test_a_damaged_table_in_the_cache_is_said_and_made_again(files, scans, console, how):
    load_index(files)
    damage_table(tables._in_cache(os.path.dirname(files[0])), how)
    scans.clear()
    assert load_index(files, console).counts.tolist() == [5, 3, 9]
    assert sorted(scans) == files
    said = console.file.getvalue()
    assert 'cannot be read' in said and said.count('\n') == 1
    scans.clear()
    load_index(files, console)
    assert scans == [] and console.file.getvalue() == said


@pytest.mark.parametrize('how', DAMAGE)
def test_a_damaged_table_beside_the_records_is_said_and_the_cache_serves(files, scans, console, how, tmp_path, capsys):
    assert index_records.main([str(tmp_path / 'train-*'), '--write']) == 0
    damage_table(tmp_path / tables.BESIDE, how)
    scans.clear()
    for _ in range(2):
        assert load_index(files, console).counts.tolist() == [5, 3, 9]
    assert scans == []
    said = console.file.getvalue()
    assert said.count(f'WARNING: the index {tmp_path / tables.BESIDE} cannot be read') == said.count('\n') == 2
    rc = index_records.main([str(tmp_path / 'train-*'), '--write'])
    if how == 'a folder':
        assert rc == 2 and 'is a folder, where an index is to be: remove it' in capsys.readouterr().err
        shutil.rmtree(tmp_path / tables.BESIDE)
    load_index(files, console)
    assert console.file.getvalue() == said


def test_a_table_that_may_not_be_read_or_is_of_another_version_is_none(files, scans, console, monkeypatch):
    load_index(files)
    monkeypatch.setattr(tables, 'VERSION', tables.VERSION + 1)
    assert load_index(files, console).counts.tolist() == [5, 3, 9] and console.file.getvalue() == ''

    def refuse(path):
        raise PermissionError(13, 'Permission denied')

    with monkeypatch.context() as patch:
        patch.setattr(np, 'load', refuse)
        assert load_index(files, console).counts.tolist() == [5, 3, 9]
    assert 'Permission denied' in console.file.getvalue()
    assert sorted(scans) == sorted(files * 3)


def test_an_index_beside_the_data_goes_where_the_data_goes(files, scans, tmp_path, capsys):
    assert index_records.main([str(tmp_path / 'train-*'), '--write']) == 0
    out = capsys.readouterr().out
    assert '3 files, 17 records; 2 compressed' in out and f'wrote {tmp_path}/.ctl-index.npz' in out
    shutil.copytree(tmp_path, tmp_path / 'copy')
    scans.clear()
    copies = find_files(str(tmp_path / 'copy' / '*'), 'data.train')  # the glob does not match the index
    index = load_index(copies)
    assert scans == []
    assert index.digest == load_index(files).digest
    os.utime(copies[0])
    assert load_index(copies).counts.tolist() == [5, 3, 9]
    assert scans == [copies[0]]


def test_index_records_lists_what_is_damaged_and_ends_with_exit_3(files, tmp_path, capsys):
    hurt(files[0], int(load_index(files).starts[2]) + 20)
    assert index_records.main([str(tmp_path / 'train-*')]) == 3
    captured = capsys.readouterr()
    assert f'{files[0]}: record 2 has a wrong checksum' in captured.out
    assert captured.err == 'error: 1 records are damaged, in 1 files.\n'


@pytest.mark.parametrize('words, said', [([], 'FILES is missing'), (['--wirte'], 'wirte'), (['nope*'], 'no file')])
def test_index_records_refuses_what_it_cannot_do_in_one_line(words, said, capsys):
    assert index_records.main(words) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and '\n' not in error


def test_an_index_of_ten_million_records_takes_four_bytes_a_record_and_needs_no_scan(tmp_path, scans):
    """The files are of the right size and hold nothing: an index that is known is believed. Speed is only bounded."""
    contents = {}
    for i in range(20):
        path = tmp_path / f'big-{i:02}'
        sizes = np.full(500_000, 100, np.uint32)
        with open(path, 'wb') as stream:
            stream.truncate(int(sizes.sum()))
        stat = os.stat(path)
        contents[str(path)] = FileRecords(stat.st_size, stat.st_mtime_ns, '', sizes, (), '0' * 16)
    table = tables.write_beside(str(tmp_path), contents)
    assert table.stat().st_size <= 4.01 * 10_000_000
    index = load_index(sorted(contents))
    assert index.records == 10_000_000 and index.starts[-1] == 49_999_900
    assert scans == []


def test_the_digest_is_of_names_and_records_and_not_of_times_or_compression(files, tmp_path):
    digest = load_index(files).digest
    os.utime(files[0])
    assert load_index(files).digest == digest
    index = load_index(files)
    renamed = dataclasses.replace(index, files=(str(tmp_path / 'other'), *files[1:]))
    assert renamed.digest != digest
    rng = np.random.default_rng(7)
    bert_records.write_file(pathlib.Path(files[0]), [bert_records.make_record(rng) for _ in range(5)])
    assert load_index(files).digest != digest


def test_files_that_changed_since_they_were_indexed_are_refused_by_name(files):
    index = load_index(files)
    index.check_unchanged(range(3))
    os.utime(files[1])
    index.check_unchanged([0, 2])
    with pytest.raises(UserError, match='train-1.tfrecord: changed since it was indexed'):
        index.check_unchanged(range(3))


def test_several_globs_are_taken_together_sorted_and_each_file_once(files, tmp_path):
    assert find_files(f'{tmp_path}/train-2*, {tmp_path}/train-*', 'data.train') == sorted(files)


def test_files_of_several_folders_are_one_index(files, tmp_path, scans):
    """Sorted, the folder between lies in the midst of the files of the one above."""
    (tmp_path / 'train-1').mkdir()
    bert_records.write_files(tmp_path / 'train-1', [2])
    both = find_files(f'{tmp_path}/*.tfrecord,{tmp_path}/*/*.tfrecord', 'data.train')
    assert load_index(both).counts.tolist() == [5, 3, 2, 9] or load_index(both).counts.tolist() == [5, 2, 3, 9]
    scans.clear()
    load_index(both)
    assert scans == []


def test_a_glob_without_files_is_refused_with_the_glob():  # C22
    with pytest.raises(UserError, match=r'data.train=nope\*: no file matches'):
        find_files('nope*', 'data.train')


def test_a_file_of_zero_bytes_is_refused_by_name(files, tmp_path):  # C26
    (tmp_path / 'train-9.tfrecord').touch()
    with pytest.raises(UserError, match='train-9.tfrecord has 0 bytes'):
        find_files(str(tmp_path / 'train-*'), 'data.train')


def test_on_a_terminal_indexing_shows_a_bar_and_elsewhere_a_line_when_it_took_long(files, monkeypatch):
    from ctl.data import index as index_lib

    terminal = rich.console.Console(file=io.StringIO(), force_terminal=True, width=100)
    load_index(files, terminal, fresh=True)
    assert 'indexing 3 files' in terminal.file.getvalue()
    plain = rich.console.Console(file=io.StringIO(), width=100)
    load_index(files, plain, fresh=True)
    assert plain.file.getvalue() == ''
    monkeypatch.setattr(index_lib, 'QUIET_SECONDS', 0.0)
    load_index(files, plain, fresh=True)
    assert 'Indexed 3 files, 17 records' in plain.file.getvalue()
