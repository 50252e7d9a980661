"""The GAN that ships with its own data learns to draw digits."""

import json
import shlex
import subprocess

import pytest

from ctl.experiment import load_experiment
from tests.runs import Workdir, door, overrides, printed_after


@pytest.mark.slow
@pytest.mark.xdist_group('digits')
def test_digits_come_closer_than_a_third_of_the_first_distance_and_than_digits_with_noise(tmp_path, capsys):
    """In an eighth of its steps."""
    words = ['--experiment=gan_digits', *overrides(train__steps=375, eval__every=0, log__every=75)]
    assert door(*words, f'--workdir={tmp_path / "run"}') == 0
    references = load_experiment('gan_digits').make_default_data(None, print).references
    first, last = Workdir(tmp_path / 'run').lines('eval')
    for name in ('frechet_distance', 'kernel_distance'):
        noisy, _ = references[name]
        assert last[name] < first[name] / 3 and last[name] < noisy
    out = capsys.readouterr().out
    assert f'(at step 0: {first["frechet_distance"]:.4f}; real digits with heavy pixel noise: ' in out
    assert sorted(path.name for path in (tmp_path / 'run' / 'pictures').iterdir()) == [
        'samples-0.png',
        'samples-375.png',
    ]


@pytest.mark.slow
@pytest.mark.xdist_group('digits')
def test_the_digits_are_1797_and_every_fifth_is_held_out(tmp_path):
    from tools import make_digits

    folder = make_digits.folder(print)
    counts = {split: len(list(folder.glob(f'{split}-*.tfrecord'))) for split in ('train', 'eval')}
    assert counts == {'train': make_digits.TRAIN_FILES, 'eval': make_digits.EVAL_FILES}
    about = json.loads((folder / 'about.json').read_text())
    assert about['digits'] == 1797 and about['accuracy'] > 0.95
    assert door('--experiment=gan_digits', '--dry_run', f'--workdir={tmp_path}') == 0


def test_the_process_that_makes_the_digits_takes_no_gpu_from_the_one_that_trains(monkeypatch):
    from tools import make_digits

    started = []

    def start(words, env, **how):
        started.append(env['CUDA_VISIBLE_DEVICES'])
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '0,1')
    monkeypatch.setattr(make_digits, '_version', lambda: 'none that is in the cache')
    monkeypatch.setattr(make_digits.subprocess, 'run', start)
    make_digits.folder(print)
    assert started == ['-1']


def test_without_scikit_learn_it_is_said_what_is_missing(tmp_path, capsys, monkeypatch):
    import importlib.metadata

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, 'version', missing)
    assert door('--experiment=gan_digits', f'--workdir={tmp_path}') == 2
    line = printed_after('scikit-learn, which is not installed: ', capsys.readouterr().err)
    assert shlex.split(line)[-2:] == ['--no-deps', 'scikit-learn'] and 'pip install' in line
