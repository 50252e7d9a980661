"""Files as the machine allows them."""

import resource

import pytest

from ctl.files import allow_open
from tests.rights import without_rights


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
