"""The input benchmark runs, and compares what it says it compares."""

import json

import pytest

from tests.runs import write_data
from tools import bench_input


@pytest.mark.slow
def test_the_benchmark_times_every_pipeline_in_turn_and_gives_ratios(tmp_path, capsys):
    words = [*write_data(tmp_path), '--rounds=1', '--seconds=0.1']
    assert bench_input.main([*words, '--json']) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result['pipelines']) == ['raw read', 'TF1 style, batch 32', 'ctl, batch 32', 'ctl, batch 256']
    assert result['pipelines']['TF1 style, batch 32']['times_tf1'] == 1
    assert all(row['records_per_s'] > 0 for row in result['pipelines'].values())
    assert 'x TF1 style' in bench_input._as_text(result)


def test_the_benchmark_refuses_what_ctl_train_refuses(capsys):
    assert bench_input.main(['--experiment=bert_mlm', '--config.data.train=nope*', '--config.data.eval=nope*']) == 2
    assert 'data.train=nope*: no file matches' in capsys.readouterr().err
