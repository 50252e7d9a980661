"""From the config to an index and a layout, and what a later start keeps of it."""

import json

import numpy as np
import pytest

from ctl import config as config_lib
from ctl.data.inputs import find_data
from tests import bert_records


def make_config(folder, compression=('',), **data):
    """Four training files whose shares differ by up to 4 records, and one for evaluation."""
    config = config_lib.base_config(train=dict(global_batch_size=8), data=data)
    config.data.train = bert_records.write_files(folder, [20, 21, 19, 23], compression=compression)
    config.data.eval = bert_records.write_files(folder, [8], 'eval')
    return config


@pytest.mark.parametrize(
    'compression, most_apart, said',
    [
        (('',), 1, 'runs of records (shares of whole files would differ by 4 records (19.3%)); shares differ by 1 rec'),
        (('', 'GZIP'), 4, 'shares differ by 4 records (19.3%), and a smaller one begins its next epoch so much earl'),
    ],
)
def test_epochs_are_equally_long_unless_files_are_compressed_and_then_it_is_said(
    tmp_path, compression, most_apart, said
):
    data = find_data(make_config(tmp_path, compression), 1, None, print)
    assert np.ptp([shard.records for shard in data.layout.shards]) == most_apart
    assert said in data.why


@pytest.mark.parametrize('shard_by', ['file', 'record'])
def test_a_run_keeps_the_shares_that_it_began_with_when_the_choice_would_be_another(tmp_path, shard_by):
    """On 2 replicas `auto` would take other shards than these; config.json has what was resolved."""
    first = make_config(tmp_path, logical_shards=2, shard_by=shard_by)
    begun = find_data(first, 1, None, print)
    later = make_config(tmp_path)
    config_lib.resume(later, json.loads(config_lib.to_json(first)))
    kept = find_data(later, 2, None, print)
    assert (kept.layout.logical_shards, kept.layout.shard_by) == (2, shard_by)
    for step in (0, 30):
        assert np.array_equal(kept.layout.replica_records(step, 1, 1), begun.layout.replica_records(step, 1, 1))


def test_other_evaluation_records_than_before_are_told_once(tmp_path):
    """A run of an older version, which kept no digest of them, is told nothing."""
    said = []

    def start(stored=None, seed=0):
        config = make_config(tmp_path)
        bert_records.write_files(tmp_path, [8], 'eval', seed=seed)
        if stored:
            config_lib.resume(config, stored, config_lib.base_config())
        find_data(config, 1, None, said.append)
        return json.loads(config_lib.to_json(config))

    first = start()
    assert start(first) == first and said == []
    older = {**first, 'data': {k: v for k, v in first['data'].items() if k != 'eval_digest'}}
    assert start(older, seed=5)['data']['eval_digest'] != first['data']['eval_digest'] and said == []
    second = start(first, seed=5)
    assert len(said) == 1 and 'WARNING: data.eval=' in said[0] and first['data']['eval_digest'] in said[0]
    assert start(second, seed=5) == second and len(said) == 1


def test_a_shorter_evaluation_takes_a_sample_of_all_files_that_is_the_same_on_any_replicas(tmp_path):
    """3 files of 40 records each, which might hold a class each; a longer one takes those of the shorter too."""

    def sample(steps, replicas=1, seed=0):
        config = make_config(tmp_path)
        config.data.eval = bert_records.write_files(tmp_path, [40, 40, 40], 'eval')
        config.eval.steps, config.train.seed = steps, seed
        return find_data(config, replicas, None, print).eval_order.tolist()

    taken = sample(3)
    assert len(set(taken)) == len(taken) == 24
    assert min(np.bincount(np.array(taken) // 40, minlength=3)) >= 4
    assert sample(3, replicas=4) == taken == sample(5)[:24] != sample(3, seed=1)
    assert sorted(sample(-1)) == sorted(sample(1000)) == list(range(120))
