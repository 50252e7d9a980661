"""Files as the machine allows them."""

import contextlib
import os
import resource

import pytest

from ctl.errors import UserError
from ctl.files import allow_open, appears_whole, cache_folder
from tests.rights import without_rights


@pytest.mark.parametrize('any_will_do', [True, False])
def test_what_another_program_has_made_meanwhile_is_not_taken_for_ones_own(tmp_path, any_will_do):
    output = tmp_path / 'made'
    refused = contextlib.nullcontext() if any_will_do else pytest.raises(UserError, match='another program has made it')
    with refused, appears_whole(output, any_will_do) as scratch:
        scratch.mkdir()
        output.mkdir()
        (output / 'theirs').touch()
    assert [path.name for path in tmp_path.rglob('*')] == ['made', 'theirs']


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    monkeypatch.delenv('XDG_CACHE_HOME', raising=False)
    monkeypatch.setenv('HOME', '')
    monkeypatch.setattr(os.path, 'expanduser', lambda path: path)
    with pytest.raises(UserError, match='set XDG_CACHE_HOME'):
        cache_folder()


def limits_after(soft: int, hard: int, number: int) -> str:
    """What is allowed after asking, where so much was allowed before; in a process of its own."""

    def ask():
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        allow_open(number, 'data.logical_shards=9')
        return resource.getrlimit(resource.RLIMIT_NOFILE)

    return without_rights(ask)


@pytest.mark.parametrize(
    'soft, hard, number, after',
    [
        (1024, 4096, 1024, 1536),  # what most machines have, and a shard for each
        (1024, 4096, 64, 1024),
        (256, 1100, 1024, 1100),
        (64, 64, 16, 64),
    ],
)
def test_as_many_open_files_are_allowed_as_there_are_shards(soft, hard, number, after):
    assert limits_after(soft, hard, number) == str((after, hard))


def test_a_machine_that_allows_too_few_open_files_is_said_and_tensorflow_does_not_abort():
    said = limits_after(64, 64, 64)
    assert said.startswith('UserError: data.logical_shards=9: ') and '`ulimit -Hn` allows 64' in said
