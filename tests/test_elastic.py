"""Invariant 4: a run goes on anywhere. The records of a step, and what they make, do not depend on the hardware."""

import json
import re

import numpy as np
import pytest

from tests.runs import Workdir, door, door_until, finish, overrides, relative_difference, start_workers, write_shallow
from tools import explain_input

STEPS, STOP = 20, 7


@pytest.fixture(scope='module')
def flags(tmp_path_factory):
    return write_shallow(tmp_path_factory.mktemp('data')) + overrides(train__steps=STEPS)


@pytest.fixture(scope='module')
def never_stopped(flags, tmp_path_factory):
    workdir = tmp_path_factory.mktemp('never_stopped')
    assert door(*flags, f'--workdir={workdir}') == 0
    return Workdir(workdir)


@pytest.mark.xdist_group('elastic')
@pytest.mark.parametrize(
    'before, after, mode',
    [
        (2, 1, 'per_replica'),
        pytest.param(4, 1, 'per_worker', marks=pytest.mark.slow),
        pytest.param(4, 2, 'per_replica', marks=pytest.mark.slow),
        pytest.param(1, 4, 'per_replica', marks=pytest.mark.slow),
        pytest.param(4, 2, 'per_worker', marks=pytest.mark.slow),
    ],
)
def test_a_run_continued_on_other_replicas_is_the_run_never_stopped(
    flags, never_stopped, tmp_path, before, after, mode
):
    workdir = f'--workdir={tmp_path}'
    words = [*flags, '--config.data.logical_shards=4', workdir]
    door_until(STOP, *words, *overrides(devices__replicas=before, devices__input_pipelines=mode))
    other = 'per_worker' if mode == 'per_replica' else 'per_replica'
    assert door(*words, *overrides(devices__replicas=after, devices__input_pipelines=other)) == 0
    found = Workdir(tmp_path)
    assert [line['step'] for line in found.lines('train')] == list(range(1, STEPS + 1))
    assert relative_difference(never_stopped.weights, found.weights) <= 1e-5
    for a, b in zip(never_stopped.lines('train'), found.lines('train'), strict=True):
        assert b['loss'] == pytest.approx(a['loss'], rel=1e-5)


@pytest.mark.slow
@pytest.mark.xdist_group('elastic')
def test_the_shards_that_the_first_start_chose_are_kept_on_other_hardware(flags, tmp_path):
    """On 1 replica the 4 files would be 4 shards; for 3 replicas they do not share evenly, and records make 12."""
    words = [*flags, '--config.train.global_batch_size=12', f'--workdir={tmp_path}']

    def chosen():
        data = Workdir(tmp_path).config['data']
        return data['logical_shards'], data['shard_by']

    door_until(STOP, *words, '--config.devices.replicas=3')
    assert chosen() == (12, 'record')
    assert door(*words, '--config.devices.replicas=1') == 0
    assert chosen() == (12, 'record')


@pytest.mark.xdist_group('elastic')
def test_hardware_that_the_runs_shards_do_not_fit_is_refused_with_what_does(flags, tmp_path, capsys):
    """On 1 replica the 4 files make 4 shards."""
    words = [*flags, '--config.train.global_batch_size=12', f'--workdir={tmp_path}']
    door_until(1, *words)
    assert door(*words, '--config.devices.replicas=3') == 2
    error = capsys.readouterr().err.strip()
    assert '\n' not in error
    replicas = re.search(r'take ([\d or]+) replicas', error)[1].split(' or ')
    shards = re.search(r'in a new workdir, --config.data.logical_shards=([\d or]+)', error)[1].split(' or ')
    assert replicas == ['1', '2', '4'] and shards == ['3', '6', '12']
    assert door(*words, '--config.devices.replicas=1') == 0
    assert [line['step'] for line in Workdir(tmp_path).lines('train')] == list(range(1, STEPS + 1))
    for number in shards:
        anew = [*words[:-1], f'--workdir={tmp_path / "new"}', f'--config.data.logical_shards={number}']
        assert explain_input.main([*anew, '--config.devices.replicas=3', '--verify']) == 0


QUICK = [(4, 1, 'per_replica'), (2, 2, 'per_worker')]


def records_of(capsys, *words):
    """[step] -> sorted records of the global batch, as explained."""
    capsys.readouterr()
    assert explain_input.main([*words, '--json', f'--steps=0:{STEPS}']) == 0
    steps = [[] for _ in range(STEPS)]
    for line in map(json.loads, capsys.readouterr().out.splitlines()):
        steps[line['step']] += map(tuple, line['records'])
    return [sorted(records) for records in steps]


@pytest.mark.parametrize(
    'replicas, workers, mode',
    [
        pytest.param(replicas, workers, mode, marks=[] if (replicas, workers, mode) in QUICK else [pytest.mark.slow])
        for replicas, workers in [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)]
        for mode in ('per_worker', 'per_replica')
    ],
)
def test_every_global_batch_has_the_same_records_on_any_replicas_workers_and_pipelines(
    flags, tmp_path, capsys, replicas, workers, mode
):  # C27, C28
    words = [*flags, f'--workdir={tmp_path}', '--config.data.logical_shards=4']
    hardware = [*overrides(devices__replicas=replicas, devices__input_pipelines=mode), f'--workers={workers}']
    assert explain_input.main([*words, *hardware, '--steps=0:20', '--verify']) == 0
    assert records_of(capsys, *words, *hardware) == records_of(capsys, *words)


@pytest.mark.parametrize('files, workers', [(1, 2), pytest.param(3, 8, marks=pytest.mark.slow)])
def test_fewer_files_than_workers_are_split_by_record_and_it_is_said(tmp_path, capsys, files, workers):  # C06, C11
    words = write_shallow(tmp_path, train_counts=[40] * files)
    assert explain_input.main([*words, f'--workers={workers}', '--steps=0:12', '--verify']) == 0
    out = capsys.readouterr().out
    assert f'runs of records ({files} files do not share over {workers} replicas)' in out
    assert f'An epoch reads {40 * files} of {40 * files} records: complete, disjoint.' in out


def test_whole_files_for_more_workers_than_files_are_refused_with_the_numbers_and_the_key(tmp_path, capsys):  # C07
    words = [*write_shallow(tmp_path, train_counts=[40]), '--workers=2']
    assert explain_input.main([*words, '--config.data.shard_by=file']) == 2
    error = capsys.readouterr().err.strip()
    assert '1 files cannot be shared over 2 replicas' in error
    assert explain_input.main([*words, re.search(r'--config\S+record', error)[0]]) == 0


@pytest.mark.parametrize('records', [9, pytest.param(20, marks=pytest.mark.slow)])
def test_a_tail_that_does_not_fill_a_batch_neither_stalls_nor_ends_the_run(tmp_path, records):  # C02, C05
    """9 records are a batch of 8 and one more; 20 are 5 batches of one replica, on two."""
    words = write_shallow(tmp_path, train_counts=[records], eval_counts=[records])
    assert door(*words, *overrides(train__steps=7, devices__replicas=2), f'--workdir={tmp_path / "run"}') == 0
    run = Workdir(tmp_path / 'run')
    assert [line['step'] for line in run.lines('train')] == list(range(1, 8))
    assert np.isfinite(run.lines('eval')[-1]['loss'])


READER = """
import json, sys
import tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
from ctl import config as config_lib, flags
from ctl.data import pipeline, records
from ctl.data.inputs import find_data
def body(request):
    data = find_data(request.config, strategy.num_replicas_in_sync, None, print,
                     workers=strategy.num_replicas_in_sync)
    with strategy.scope():
        source = records.make_source(data.train, request.module.make_experiment(request.config), data.bad)
    dataset = pipeline.distribute(strategy, pipeline.make_train_dataset_fn(source, data.layout, 0), False)
    for step, batch in zip(range(20), dataset):
        (mine,) = strategy.experimental_local_results(batch['record'])
        print(json.dumps(mine.numpy().tolist()), flush=True)
sys.exit(flags.ExperimentProgram('reader', '').run(sys.argv[1:], body))
"""


@pytest.mark.slow  # tests/test_workers.py has what they make of them
def test_two_real_workers_read_disjoint_halves_of_the_batches_of_one(flags, tmp_path, capsys):  # C10
    """Two processes with TF_CONFIG, each with its own input pipeline."""
    workers = start_workers(2, '-c', READER, *flags, f'--workdir={tmp_path}')
    outputs = finish(workers)
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    fed = [[json.loads(line) for line in out.splitlines() if line.startswith('[')] for out, _ in outputs]
    explained = records_of(capsys, *flags, f'--workdir={tmp_path}')
    for step in range(STEPS):
        assert len(set(fed[0][step]) & set(fed[1][step])) == 0
        both = sorted((f'train-{r // 20}.tfrecord', r % 20) for r in fed[0][step] + fed[1][step])
        assert both == explained[step]
