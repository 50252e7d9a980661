"""A test touches nothing outside of its own folders, and one that does is caught."""

import os
import pathlib

from tests import conftest


def test_a_file_of_the_clone_that_is_opened_to_be_written_is_noticed(tmp_path):
    readme = conftest.ROOT / 'README.md'
    with open(readme, 'r+'):
        pass
    (tmp_path / 'mine').write_text('this is not')
    readme.read_text()  # nor is this
    assert conftest.touched_outside == [str(readme)]
    conftest.touched_outside.clear()


def test_files_that_are_made_renamed_and_removed_elsewhere_are_noticed(tmp_path):
    elsewhere = conftest.ROOT / 'no such folder'
    for do in (
        lambda: os.mkdir(elsewhere / 'a'),
        lambda: os.remove(elsewhere / 'a'),
        lambda: os.rename(tmp_path / 'no such file', elsewhere / 'a'),
    ):
        try:
            do()
        except OSError:
            conftest.touched_outside.pop()
    assert conftest.touched_outside == []


def test_home_cache_temporary_files_and_the_working_folder_are_the_tests_own(tmp_path):
    base = tmp_path.parent
    places = [pathlib.Path.home(), os.environ['XDG_CACHE_HOME'], os.environ['TMPDIR'], pathlib.Path.cwd()]
    assert all(pathlib.Path(place).is_relative_to(base) for place in places)
    assert not any(pathlib.Path.cwd().iterdir())
