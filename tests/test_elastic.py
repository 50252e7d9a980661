"""Invariant 4: a run goes on anywhere. The records of a step, and what they make, do not depend on the hardware."""

import itertools
import json
import subprocess
import sys

import numpy as np
import pytest

from ctl import config as config_lib
from ctl.data.inputs import find_data
from experiments import bert_mlm
from tests import bert_records
from tests.runs import (
    DEADLINE,
    Workdir,
    door,
    door_until,
    finish,
    overrides,
    relative_difference,
    start_workers,
    walk,
    write_shallow,
)
from tools import explain_input

STEPS, BATCH = 24, 24
HARDWARE = [1, 2, 3, 4, 6, 8, 16, 128, 1000]  # replicas


@pytest.fixture(scope='module')
def flags(tmp_path_factory):
    """4 files; the largest number of shards of a batch of 24 is 24."""
    data = write_shallow(tmp_path_factory.mktemp('data'))
    return data + overrides(train__steps=STEPS, train__global_batch_size=BATCH)


@pytest.fixture(scope='module')
def never_stopped(flags, tmp_path_factory):
    """4 shards of whole files, so that 3 and 6 pipelines do not divide them."""
    workdir = tmp_path_factory.mktemp('never_stopped')
    assert door(*flags, '--config.data.logical_shards=4', f'--workdir={workdir}') == 0
    return Workdir(workdir)


def check_the_same(never_stopped, found):
    assert [line['step'] for line in found.lines('train')] == list(range(1, STEPS + 1))
    assert relative_difference(never_stopped.weights, found.weights) <= 1e-5
    for a, b in zip(never_stopped.lines('train'), found.lines('train'), strict=True):
        assert b['loss'] == pytest.approx(a['loss'], rel=1e-5)


def test_a_walk_takes_every_direction_once():
    way = walk([1, 2, 3, 4, 6])
    assert sorted(itertools.pairwise(way)) == sorted(itertools.permutations([1, 2, 3, 4, 6], 2))


@pytest.mark.xdist_group('elastic')
def test_a_run_goes_on_on_more_and_on_fewer_replicas_as_if_it_had_never_stopped(flags, never_stopped, tmp_path):
    """2, 3 and 1 replicas; the 3 with a pipeline each, which do not divide the 4 shards."""
    words = [*flags, f'--workdir={tmp_path}']
    door_until(5, *words, *overrides(devices__replicas=2, data__logical_shards=4))
    door_until(12, *words, *overrides(devices__replicas=3, devices__input_pipelines='per_replica'))
    assert door(*words, *overrides(devices__replicas=1)) == 0
    check_the_same(never_stopped, Workdir(tmp_path))


ON_SIX_DEVICES = """
import json, sys
import tensorflow as tf
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices('CPU')[0], [tf.config.LogicalDeviceConfiguration()] * 6)
from tests.runs import door, door_until
for step, words in json.loads(sys.argv[1]):
    door_until(step, *words)
sys.exit(door(*words))
"""


@pytest.mark.slow
@pytest.mark.xdist_group('elastic')
@pytest.mark.parametrize('mode', ['per_worker', 'per_replica'])
def test_a_run_goes_on_between_1_2_3_4_and_6_replicas_in_every_direction(flags, never_stopped, tmp_path, mode):
    legs = [
        (step, [*flags, f'--workdir={tmp_path}', *overrides(data__logical_shards=4, devices__replicas=replicas)])
        for step, replicas in enumerate(walk([1, 2, 3, 4, 6]), start=1)
    ]
    legs = [(step, [*words, f'--config.devices.input_pipelines={mode}']) for step, words in legs]
    program = [sys.executable, '-c', ON_SIX_DEVICES, json.dumps(legs)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=DEADLINE)
    assert ended.returncode == 0, ended.stderr
    check_the_same(never_stopped, Workdir(tmp_path))


@pytest.mark.parametrize('choice', [{}, pytest.param({'logical_shards': 48}, marks=pytest.mark.slow)])
def test_a_run_that_began_on_any_hardware_goes_on_on_any_other_with_the_same_records(tmp_path, choice):
    """The global batch is a multiple of all; each replica is a worker, and is fed by a pipeline of its own."""
    bert_records.write_files(tmp_path, [300] * 8)
    bert_records.write_files(tmp_path, [7], 'eval')
    batch, steps = int(np.lcm.reduce(HARDWARE)), (0, 1, 10_000)

    def find(replicas, begun_with=None):
        config = bert_mlm.get_config()
        config.train.global_batch_size = batch
        config.data.update(train=f'{tmp_path}/train*', eval=f'{tmp_path}/eval*', **choice)
        config_lib.resume(config, begun_with)
        return find_data(config, replicas, None, print, workers=replicas), config.to_dict()

    records = {}  # (how the data is shared, step) -> sorted, as any hardware was fed
    for begun_on, gone_on_with in itertools.product(HARDWARE, HARDWARE):
        data, _ = find(gone_on_with, begun_with=find(begun_on)[1])
        layout = data.layout
        shared = layout.logical_shards, layout.shard_by, layout.block_records, layout.window_records
        for step in steps:
            if (shared, gone_on_with, step) in records:
                continue
            fed = layout.replica_records(step, gone_on_with, data.pipelines)
            assert [len(each) for each in fed] == [batch // gone_on_with] * gone_on_with
            records[shared, gone_on_with, step] = np.sort(np.concatenate(fed))
    assert len({shared for shared, _, _ in records}) == 1
    for (_, _, step), found in records.items():
        assert np.array_equal(found, records[shared, 1, step])


QUICK = [(3, 1, 'per_replica'), (2, 3, 'per_worker')]


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
        for replicas, workers in [(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (1, 3), (2, 3), (1, 8)]
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
def test_few_files_are_split_by_record_and_it_is_said(tmp_path, capsys, files, workers):  # C06, C11
    words = write_shallow(tmp_path, train_counts=[40] * files)
    assert explain_input.main([*words, f'--workers={workers}', '--steps=0:12', '--verify']) == 0
    out = capsys.readouterr().out
    assert '8 logical shards; runs of records (' in out and 'Read again' not in out
    assert f'An epoch reads {40 * files} of {40 * files} records: complete, disjoint.' in out


def test_whole_files_on_more_workers_than_files_are_read_by_several_and_it_is_said(tmp_path, capsys):  # C07
    words = [*write_shallow(tmp_path, train_counts=[40]), '--workers=2', '--config.data.shard_by=file']
    assert explain_input.main([*words, '--steps=0:12', '--verify']) == 0
    out = capsys.readouterr().out
    assert (
        'pipeline 1 of 2: shards 0; 1 files, 40 records (100.0%); 4 of their 8 rows in a global batch, from 4 on' in out
    )
    assert 'Read again: 100% of the records: 2 pipelines do not divide 1 shards' in out
    assert 'An epoch reads 40 of 40 records: complete, disjoint.' in out


@pytest.mark.slow
@pytest.mark.parametrize('records', [9, 20])
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
    for step, batch in zip(range(24), dataset):
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
