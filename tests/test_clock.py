"""Every second of a run is counted once, over all its starts."""

import json
import time

import pytest

from ctl.runtime.clock import KINDS, Clock, as_text
from tests.runs import Workdir, door, overrides, running, write_shallow


@pytest.fixture
def now(monkeypatch):
    """A clock that goes on when told."""

    class Now:
        seconds = 1000.0

        def __iadd__(self, seconds):
            self.seconds += seconds
            return self

    now = Now()
    monkeypatch.setattr(time, 'monotonic', lambda: now.seconds)
    monkeypatch.setattr('ctl.runtime.clock._age_of_process', lambda: 5.0)
    return now


def test_time_is_of_the_kind_that_was_entered_and_input_is_taken_out_of_steps(now):
    clock = Clock()
    now += 2
    clock.enter('step')
    now += 10
    with clock.during('eval'):
        now += 3
    now += 1
    clock.move(4, 'step', 'input wait')
    expected = {'start-up': 7, 'step': 7, 'eval': 3, 'input wait': 4}
    assert clock.seconds == {kind: expected.get(kind, 0) for kind in KINDS}


def test_what_was_done_after_the_last_checkpoint_is_lost_when_the_process_was_killed(now, tmp_path):
    clock = Clock()
    clock.go_on(tmp_path / 'time.json')
    clock.enter('step')
    now += 10
    with clock.during('save'):
        now += 1
    clock.saved()
    now += 6
    clock.write()
    now += 100  # killed somewhere here
    again = Clock()
    again.go_on(tmp_path / 'time.json')
    assert again.seconds == {
        'start-up': 10, 'restore': 0, 'input wait': 0, 'step': 10, 'eval': 0, 'save': 1, 'lost': 6,
    }  # fmt: skip


def test_the_file_is_written_every_few_seconds_and_whenever_it_must_be(now, tmp_path):
    clock, path = Clock(), tmp_path / 'time.json'

    def written():
        return sum(json.loads(path.read_text())['seconds'].values())

    clock.go_on(path)
    assert written() == 5
    for expected in (5, 5, 5, 5, 10, 10):
        now += 1
        clock.write_now_and_then()
        assert written() == expected
    clock.write()
    assert written() == 11
    now += 1
    clock.saved()
    assert written() == 12


def test_a_run_of_short_inner_loops_does_not_write_the_file_after_each(tmp_path, monkeypatch):
    """But at its start, before the one checkpoint and after it, and at the end."""
    times = []
    monkeypatch.setattr('ctl.runtime.clock.replace_text', lambda path, text: times.append(json.loads(text)))
    monkeypatch.setattr('ctl.runtime.clock.WRITE_SECONDS', 3600.0)
    words = [*write_shallow(tmp_path), *overrides(train__steps=8, eval__every=0, train__steps_per_loop=1)]
    assert door(*words, f'--workdir={tmp_path / "run"}') == 0
    assert len(times) == 4


def test_the_line_has_the_whole_and_the_shares():
    seconds = {**dict.fromkeys(KINDS, 0.0), 'step': 75.0, 'start-up': 25.0}
    assert as_text(seconds).startswith('100 s: start-up 25%, restore 0%, input wait 0%, step 75%, ')
    assert as_text(seconds).endswith('75% of it was training')


def read(workdir):
    return json.loads((workdir / 'time.json').read_text())['seconds']


@pytest.mark.slow
def test_a_run_says_where_its_time_went_and_counts_on_when_it_goes_on(tmp_path, capsys):
    words = [*write_shallow(tmp_path), *overrides(train__steps=6, eval__every=2), f'--workdir={tmp_path / "run"}']
    assert door(*words, '--config.train.steps=4') == 0
    first = read(tmp_path / 'run')
    assert door(*words) == 0
    second = read(tmp_path / 'run')
    assert 'of it was training' in capsys.readouterr().out
    for kind in ('start-up', 'step', 'eval', 'save'):
        assert 0 < first[kind] < second[kind], kind
    assert second['restore'] > first['restore'] and second['lost'] == 0


@pytest.mark.slow
def test_the_seconds_of_a_process_add_up_to_its_life_and_a_kill_makes_lost_ones(tmp_path):
    """All of them, for there is no checkpoint."""
    words = [
        *write_shallow(tmp_path),
        *overrides(eval__every=0, checkpoint__every=1_000_000),
        f'--workdir={tmp_path / "run"}',
    ]
    began, time_file = time.monotonic(), tmp_path / 'run' / 'time.json'
    with running(*words, '--config.train.steps=1000000') as process:
        while not time_file.exists() or not read(tmp_path / 'run')['step']:
            assert process.stdout.readline()
        process.kill()
        lived = time.monotonic() - began
    before = read(tmp_path / 'run')
    assert 0 < sum(before.values()) < lived + 1
    with running(*words, '--config.train.steps=20') as process:
        process.communicate()
    assert process.returncode == 0
    assert read(tmp_path / 'run')['lost'] >= before['step']
    assert len(Workdir(tmp_path / 'run').lines('train')) == 20
