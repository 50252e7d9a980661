"""What the launcher of several workers gives each, and how long it waits; tests/test_workers.py runs it."""

import pytest

from ctl.errors import UserError
from tools import launch as launcher


@pytest.mark.parametrize(
    'visible, shared',
    [
        (None, [{}, {}]),
        ('', [{}, {}]),
        ('-1', [{}, {}]),
        ('0,1', [{'CUDA_VISIBLE_DEVICES': '0'}, {'CUDA_VISIBLE_DEVICES': '1'}]),
        ('4, 5,6,GPU-1f', [{'CUDA_VISIBLE_DEVICES': '4,5'}, {'CUDA_VISIBLE_DEVICES': '6,GPU-1f'}]),
    ],
)
def test_launch_shares_the_gpus_out(monkeypatch, tmp_path, visible, shared):
    monkeypatch.setattr(launcher, '_NVIDIA', tmp_path)  # none on this machine
    assert launcher.share_gpus({} if visible is None else {'CUDA_VISIBLE_DEVICES': visible}, 2) == shared


def test_launch_refuses_gpus_that_do_not_share_evenly_with_what_does(monkeypatch, tmp_path):
    for gpu in ('0000:01', '0000:02', '0000:03', '0000:04'):
        (tmp_path / gpu).mkdir()
    monkeypatch.setattr(launcher, '_NVIDIA', tmp_path)
    assert launcher.share_gpus({}, 4)[3] == {'CUDA_VISIBLE_DEVICES': '3'}
    with pytest.raises(UserError, match='--workers=3: 4 GPUs do not share evenly: take 1 or 2 or 4, or CUDA_VISIBLE'):
        launcher.share_gpus({}, 3)


@pytest.mark.parametrize(
    'codes, signalled, patience',
    [
        ([None, 0], False, 17),
        ([None, 75], False, 17),
        ([None, 75], True, 0),
        ([None, 0], True, 0),
        ([None, 2], True, 60),
        ([None, -9], False, 17),
        ([None, 1], False, 60),
    ],
)
def test_launch_waits_for_who_saves_and_as_long_as_a_stall_may_last(codes, signalled, patience):
    started = launcher._Launcher(2, ['--config.devices.stall_seconds=17', '--config.train.steps=3'], '')
    started.signalled = signalled
    assert started._patience(codes) == patience


STALL = ['--workers=2', '--', '--config.devices.stall_seconds=abc']


@pytest.mark.parametrize('words', [[], ['--workers=2'], ['--workers=0', '--', '-x'], ['--wokers=2', '--', '-x'], STALL])
def test_launch_refuses_what_it_does_not_understand_in_one_line(words, capsys):
    assert launcher.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith('error: ') and error.count('\n') == 1
