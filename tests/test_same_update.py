"""Invariants 2 and 5: the same update, and the same evaluation, on any number of replicas and microbatches."""

import pytest

from tests.runs import Workdir, door, overrides, relative_difference, running, write_data, write_shallow

# One worker process for each: its runs share the run on one replica.
UPDATES = [
    pytest.param((name, write), marks=[pytest.mark.xdist_group(name), *([] if quick else [pytest.mark.slow])])
    for name, write, quick in [
        ('lamb', write_shallow, True),
        *((name, write_data, False) for name in ('lamb', 'adamw', 'sgd', 'adam')),
    ]
]


@pytest.fixture(scope='module', params=UPDATES)
def one_replica(request, tmp_path_factory):
    name, write = request.param
    folder = tmp_path_factory.mktemp(name)
    flags = write(folder) + overrides(optimizer__name=name, train__steps=20)
    assert door(*flags, f'--workdir={folder / "one"}') == 0
    return flags, Workdir(folder / 'one')


@pytest.mark.parametrize(
    'replicas, microbatches, more',
    [
        (2, 2, {'devices__all_reduce': 'hierarchical'}),
        pytest.param(2, 1, {'devices__all_reduce': 'ring', 'devices__bytes_per_pack': 1000}, marks=pytest.mark.slow),
        pytest.param(4, 1, {'devices__input_pipelines': 'per_replica'}, marks=pytest.mark.slow),
        pytest.param(1, 2, {}, marks=pytest.mark.slow),
    ],
)
def test_replicas_and_microbatches_make_the_update_of_one_replica(one_replica, tmp_path, replicas, microbatches, more):
    flags, expected = one_replica
    words = [*flags, *overrides(devices__replicas=replicas, train__microbatches=microbatches, **more)]
    if more.get('devices__all_reduce') == 'ring':  # of which a process can run one
        with running(*words, f'--workdir={tmp_path}') as process:
            _, error = process.communicate()
        assert process.returncode == 0, error
    else:
        assert door(*words, f'--workdir={tmp_path}') == 0
    found = Workdir(tmp_path)
    assert relative_difference(expected.weights, found.weights) <= 1e-5
    for a, b in zip(expected.lines('train'), found.lines('train'), strict=True):
        assert b['loss'] == pytest.approx(a['loss'], rel=1e-5)
        assert b['examples'] == a['examples'] == 8 * a['step']  # C16
    assert found.lines('eval')[-1]['loss'] == pytest.approx(expected.lines('eval')[-1]['loss'], rel=1e-5)
