"""Invariant 6: what the explain tool says is what the pipeline reads."""

import json

import numpy as np
import pytest

from ctl.data import shards
from tests.runs import door, overrides, write_data
from tools import explain_input


@pytest.fixture(scope='module')
def flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp('data')
    return [*write_data(folder, train_counts=(20, 21, 19, 20)), f'--workdir={folder / "run"}']


TOPOLOGIES = [
    {'devices__replicas': 2},
    {'devices__replicas': 4, 'devices__input_pipelines': 'per_replica'},
    pytest.param({}, marks=pytest.mark.slow),
    pytest.param({'devices__replicas': 2, 'data__shard_by': 'record'}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize('topology', TOPOLOGIES)
def test_the_pipeline_reads_what_is_said(flags, capsys, topology):
    assert explain_input.main([*flags, *overrides(**topology), '--steps=3:30', '--verify']) == 0
    captured = capsys.readouterr()
    assert 'An epoch reads 80 of 80 records: complete, disjoint.' in captured.out
    assert 'verified: the pipeline read exactly this in steps 3 to 29.' in captured.err


@pytest.mark.parametrize('mode', ['per_worker', pytest.param('per_replica', marks=pytest.mark.slow)])
def test_simulated_workers_are_verified_by_calling_dataset_fn_as_they_would(flags, capsys, mode):
    words = overrides(devices__replicas=2, devices__input_pipelines=mode)
    assert explain_input.main([*flags, *words, '--workers=2', '--steps=0:12', '--verify']) == 0
    pipelines = {'per_worker': 2, 'per_replica': 4}[mode]
    assert f'pipeline {pipelines - 1} of {pipelines}' in capsys.readouterr().out


def lines_of(capsys, *words):
    assert explain_input.main([*words, '--json']) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_json_has_a_line_for_each_step_and_replica_and_disjoint_records(flags, capsys):
    lines = lines_of(capsys, *flags, '--config.devices.replicas=4', '--steps=5:7')
    assert [(line['step'], line['replica'], line['pipeline']) for line in lines] == [
        (step, replica, 0) for step in (5, 6) for replica in range(4)
    ]
    for step in (5, 6):
        records = [tuple(record) for line in lines if line['step'] == step for record in line['records']]
        assert len(records) == len(set(records)) == 8
        assert all(file.startswith('train-') and isinstance(number, int) for file, number in records)


@pytest.mark.slow  # tests/test_elastic.py has two kinds of hardware
def test_hardware_changes_who_reads_a_record_but_not_which_are_in_a_step(flags, capsys):
    read = []
    for words in (['--config.devices.replicas=1'], ['--config.devices.replicas=4'], ['--workers=2']):
        lines = lines_of(capsys, *flags, *words, '--steps=9:10')
        read.append(sorted(tuple(record) for line in lines for record in line['records']))
    assert read[0] == read[1] == read[2]


@pytest.mark.slow
def test_the_input_of_a_run_is_explained_with_what_it_chose(flags, tmp_path, capsys):
    words = [*flags[:-1], f'--workdir={tmp_path}']
    assert door(*words, *overrides(train__steps=1, data__logical_shards=2)) == 0
    capsys.readouterr()
    assert explain_input.main(words) == 0
    assert '2 logical shards' in capsys.readouterr().out


def test_a_pipeline_that_reads_something_else_ends_with_exit_3_and_the_place(flags, monkeypatch, capsys):
    """The pipeline shuffles by a permutation that the explanation does not have."""
    said = shards.Layout.replica_records
    monkeypatch.setattr(
        shards.Layout, 'replica_records', lambda self, *place: [np.roll(r, 1) for r in said(self, *place)]
    )
    assert explain_input.main([*flags, '--verify']) == 3
    assert 'error: step 0, replica 0, place 0: the pipeline read' in capsys.readouterr().err


@pytest.mark.parametrize('steps', ['3', '5:2', 'a:b', ':'])
def test_steps_that_are_none_are_refused(flags, steps, capsys):
    assert explain_input.main([*flags, f'--steps={steps}']) == 2
    assert f'--steps={steps}: expected A:B' in capsys.readouterr().err
