"""Paths as people write them."""

import glob
import os
import pathlib

import hypothesis
import hypothesis.strategies as st
import pytest

from ctl import paths, train
from ctl.data.file_names import doubts
from ctl.errors import UserError
from ctl.paths import find_files, local_path
from tests.rights import without_rights

# Legal in a name, and each means something to a shell, a glob, a list or TensorFlow.
ODD = 'ab,[]*?!~ {}$\'"\\é-'


def put(folder, *names, text='x'):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize('folder', ['runs[1]', 'a,b', 'what?', 'all*', '{x}', 'c[!a]d,e', 'two  spaces', "it's", 'é'])
def test_a_folder_that_exists_is_no_pattern_and_a_comma_in_it_separates_nothing(tmp_path, folder):  # N19
    put(tmp_path, f'{folder}/train-0', f'{folder}/train-1', 'other/train-2')
    both = f'{tmp_path}/{folder}/train-*,{tmp_path}/other/*'
    names = [os.path.relpath(path, tmp_path) for path in find_files(both, 'data.train')]
    assert names == sorted([f'{folder}/train-0', f'{folder}/train-1', 'other/train-2'])


@hypothesis.given(st.lists(st.text(ODD, min_size=1, max_size=6), min_size=1, max_size=4, unique=True))
def test_any_list_of_files_that_exist_is_those_files(tmp_path_factory, names):
    folder = tmp_path_factory.mktemp('odd')
    names = [f'{name}.tfrecord' for name in names]
    put(folder, *names)
    # One after the other, for `a,b` may be two files or one: what exists is longest.
    for name in names:
        assert find_files(f'{folder}/{name}', 'data.train') == [f'{folder}/{name}']
    assert set(find_files([f'{folder}/{name}' for name in names], '')) == {f'{folder}/{name}' for name in names}


def test_home_is_where_a_shell_left_it_in_a_list_too(tmp_path, monkeypatch):  # N05, N23
    monkeypatch.setenv('HOME', str(tmp_path))
    put(tmp_path, 'rec/a', 'rec/b')
    assert find_files('~/rec/a,~/rec/b', 'data.train') == [f'{tmp_path}/rec/a', f'{tmp_path}/rec/b']
    assert local_path('~/runs/a', '--workdir') == tmp_path / 'runs' / 'a'


def test_folders_among_what_a_glob_matches_are_passed_over_and_a_folder_alone_is_told_what_to_write(tmp_path):
    put(tmp_path, 'rec/a', 'rec/more/b')
    assert find_files(f'{tmp_path}/rec/*', '--text') == [f'{tmp_path}/rec/a']
    assert len(find_files(f'{tmp_path}/rec/**', '--text')) == 2
    with pytest.raises(UserError, match='is a folder. Name the files in it: ') as raised:
        find_files(f'{tmp_path}/rec', '--text')
    told = str(raised.value).rpartition(': ')[2]
    assert find_files(told, '--text') == [f'{tmp_path}/rec/a']


def test_a_folder_of_records_is_told_those_that_were_meant(tmp_path):
    put(tmp_path, 'train-0', 'eval-0', 'vocab.txt')
    for key in ('data.train', 'data.eval'):
        with pytest.raises(UserError, match='is a folder') as raised:
            find_files(f'{tmp_path}', key)
        told = str(raised.value).rpartition(': ')[2]
        assert find_files(told, key) == [f'{tmp_path}/{key[5:]}-0']


def test_what_spark_says_of_its_files_is_none_of_them(tmp_path):
    put(tmp_path, 'part-r-00000', '.part-r-00000.crc')
    put(tmp_path, '_SUCCESS', text='')
    assert find_files(f'{tmp_path}/*', 'data.train') == [f'{tmp_path}/part-r-00000']
    with pytest.raises(UserError, match='_SUCCESS has 0 bytes'):
        find_files(f'{tmp_path}/_SUCCESS', 'data.train')


@pytest.mark.parametrize(
    'pattern, said', [('$DATA/train*', 'double quotes'), ('{a,b}*', 'two globs'), ('a*', 'seen from')]
)
def test_a_glob_that_matches_nothing_is_told_why(pattern, said):
    with pytest.raises(UserError, match=f'no file matches.*{said}'):
        find_files(pattern, 'data.train')


def test_a_file_named_twice_is_there_once(tmp_path, monkeypatch):
    put(tmp_path, 'a')
    monkeypatch.chdir(tmp_path)
    assert len(find_files(f'a,./a,{tmp_path}/a,../{tmp_path.name}/*', 'data.train')) == 1


def test_a_link_to_nothing_is_named_and_not_passed_over(tmp_path):
    put(tmp_path, 'train-0')
    (tmp_path / 'train-1').symlink_to('moved/train-1')
    with pytest.raises(UserError, match='train-1 is a link to moved/train-1, which is not there'):
        find_files(f'{tmp_path}/train-*', 'data.train')


def test_links_do_not_make_more_files_of_the_same(tmp_path):
    put(tmp_path, 'a/train-0', 'b/train-1')
    for name in ('here', 'again', 'a/up'):
        (tmp_path / name).symlink_to(tmp_path)
    (tmp_path / 'c').symlink_to(tmp_path / 'a')
    found = find_files(f'{tmp_path}/**/train-*', 'data.train')
    assert sorted(os.path.realpath(path) for path in found) == [f'{tmp_path}/a/train-0', f'{tmp_path}/b/train-1']


@hypothesis.given(
    st.lists(st.sampled_from(['*', '**', 'a*', '?', '[ab]', 'a', 'b', '.a', '.*', '']), min_size=1, max_size=4)
)
def test_a_glob_matches_what_everybody_else_s_does(tmp_path_factory, parts):
    folder = tmp_path_factory.mktemp('tree')
    put(folder, 'a/a/a', 'a/b', 'b/ab/a', 'b/.a/a', '.a', 'ab/c/.b', 'c')
    hypothesis.assume(parts[0])  # the root
    theirs = glob.glob('/'.join(parts), root_dir=folder, recursive=True)
    theirs = {os.path.normpath(path) for path in theirs if os.path.isfile(os.path.join(folder, path))}
    ours = {os.path.relpath(path, folder) for path in paths._expand(f'{folder}/', parts, '') if os.path.isfile(path)}
    assert ours == theirs


def test_an_empty_folder_and_one_of_folders_are_told_what_helps(tmp_path):
    (tmp_path / 'empty').mkdir()
    with pytest.raises(UserError, match='is a folder. There is no file in it'):
        find_files(str(tmp_path / 'empty'), 'data.train')
    put(tmp_path, 'deep/x/y/train-0', 'deep/x/y/other')
    with pytest.raises(UserError, match='is a folder. Name the files in it') as raised:
        find_files(str(tmp_path / 'deep'), 'data.train')
    assert find_files(str(raised.value).rpartition(': ')[2], 'data.train') == [f'{tmp_path}/deep/x/y/train-0']


def test_a_pipe_is_named_and_not_passed_over(tmp_path):  # as bash makes one of <(zcat a.gz)
    put(tmp_path, 'train-0')
    os.mkfifo(tmp_path / 'train-1')
    for text in (f'{tmp_path}/train-*', f'{tmp_path}/train-1'):
        with pytest.raises(UserError, match='train-1 is a pipe or a device'):
            find_files(text, 'data.train')


@pytest.mark.parametrize('pattern', ['*/train-*', '**/train-*', '**', 'closed/train-*', 'closed/deeper/train-*'])
@pytest.mark.parametrize('mode', [0o000, 0o400, 0o100])
def test_a_folder_that_may_not_be_read_is_named_and_not_passed_over(tmp_path, pattern, mode):
    put(tmp_path, 'open/train-0', 'closed/train-1', 'closed/deeper/train-2')
    (tmp_path / 'closed').chmod(mode)
    try:
        said = without_rights(lambda: find_files(f'{tmp_path}/{pattern}', 'data.train'))
    finally:
        (tmp_path / 'closed').chmod(0o700)
    if mode == 0o100 and 'deeper' in pattern:  # the way through is open
        assert said == f"['{tmp_path}/closed/deeper/train-2']"
    else:
        assert f'the folder {tmp_path}/closed' in said and 'permission denied' in said, said


@pytest.mark.parametrize('address', ['gs://bucket/train*', 's3://bucket/a', 'hdfs://a/b', 'https://a.example/b'])
def test_an_address_is_refused_wherever_a_path_is_asked_for(address):  # N22
    for ask in (lambda: find_files(f'a*,{address}', 'data.train'), lambda: local_path(address, '--workdir')):
        with pytest.raises(UserError, match='no file matches|is an address'):
            ask()
    with pytest.raises(UserError, match='data.train=.*: is an address'):
        find_files(address, 'data.train')


@pytest.mark.parametrize(
    'text, said',
    [
        ('file:///a/train-0', 'write the path alone: /a/train-0'),
        ('~nobody-at-all/train-0', 'there is no such user here'),
        (os.fsdecode(b'train-\xff'), 'is a name that is no UTF-8. Rename it'),
        (' ,', 'names no file'),
        ('', 'names no file'),
    ],
)
def test_what_is_no_path_is_said(tmp_path, monkeypatch, text, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=said):
        find_files(text, 'data.train')


def test_a_name_that_nobody_can_write_down_is_refused_where_a_glob_meets_it(tmp_path):
    path = os.fsencode(tmp_path) + b'/train-\xff'
    with open(path, 'w') as file:
        file.write('x')
    with pytest.raises(UserError, match=r"train-.xff' is a name that is no UTF-8"):
        find_files(f'{tmp_path}/train-*', 'data.train')


def test_a_folder_that_cannot_be_looked_into_is_said_by_whatever_meets_it_first(tmp_path):
    (tmp_path / 'closed').mkdir(mode=0)
    for words in ([f'--workdir={tmp_path}/closed/run'], [f'--workdir={tmp_path}/{"n" * 300}']):
        said = without_rights(lambda words=words: train.main(['--experiment=gan_digits', *words, '--dry_run']))
        assert said == '2', said


def test_what_the_names_of_files_say_against_them_is_warned_of(tmp_path):  # N16, N18
    names = ['train-00000-of-00004', 'train-00001-of-00004', 'train-00003-of-00004', 'train-00000-of-00002', 'eval-0']
    put(tmp_path, *names)
    files = {name: f'{tmp_path}/{name}' for name in names}
    lines = doubts(list(files.values()), [files['eval-0']])
    assert any('of 5 training files, 1 is in data.eval too' in line for line in lines)
    assert any('train-*-of-00002, train-*-of-00004 side by side' in line for line in lines)
    assert any('1 of 4 files is not there: train-00002-of-00004' in line for line in lines)
    assert any('1 of 2 files is not there: train-00001-of-00002' in line for line in lines)
    assert len(lines) == 4


@pytest.mark.parametrize(
    'names',
    [
        [f'train-{i:05}-of-00003' for i in range(3)],
        [f'part-{i}-of-3.tfrecord.gz' for i in (1, 2, 3)],  # from 1
        ['train.tfrecord-00000-of-00001'],
        ['wiki-2-of-20261203120000'],  # no number of files
        ['a', 'b'],
    ],
)
def test_files_with_nothing_against_them_are_not_warned_of(tmp_path, names):
    put(tmp_path, *names)
    assert doubts([f'{tmp_path}/{name}' for name in names], []) == []


def test_two_names_of_one_file_are_warned_of(tmp_path):
    put(tmp_path, 'a')
    (tmp_path / 'b').symlink_to(tmp_path / 'a')
    pathlib.Path(tmp_path / 'c').hardlink_to(tmp_path / 'a')
    (line,) = doubts([f'{tmp_path}/{name}' for name in 'abc'], [])
    assert 'are one file by 3 names' in line
