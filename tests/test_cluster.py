"""Who takes part: what is wrong with an environment is said before TensorFlow sees it."""

import json

import pytest
import tensorflow as tf

from ctl.errors import UserError
from ctl.runtime.cluster import Cluster, check_alone, explain_loss, read_cluster
from tests.runs import door, overrides, write_shallow
from tools import explain_input


def tf_config(cluster, kind='worker', index=0):
    return {'TF_CONFIG': json.dumps({'cluster': cluster, 'task': {'type': kind, 'index': index}})}


def test_workers_are_counted_from_the_chief():
    assert read_cluster(tf_config({'worker': ['a:1', 'b:2']}, index=1)) == Cluster(('a:1', 'b:2'), 1)
    both = {'chief': ['c:3'], 'worker': ['a:1', 'b:2']}
    assert read_cluster(tf_config(both, 'chief')) == Cluster(('c:3', 'a:1', 'b:2'), 0)
    assert read_cluster(tf_config(both, 'worker', 1)) == Cluster(('c:3', 'a:1', 'b:2'), 2)


@pytest.mark.parametrize(
    'environment, said',
    [
        ({}, 'TF_CONFIG is not set'),
        ({'TF_CONFIG': '{"cluster": '}, 'TF_CONFIG is not JSON'),
        ({'TF_CONFIG': '{"cluster": {"worker": ["a:1"]}}'}, 'must have cluster, task.type and task.index'),
        ({'TF_CONFIG': '[]'}, 'must have cluster'),
        (tf_config({'worker': ['a:1']}, 'master'), "task.type='master' is not in cluster, which has worker"),
        (tf_config({'worker': ['a:1']}, index=1), 'task.index=1 is not in 0 to 0'),
        (tf_config({'worker': ['a:1']}, index='0'), 'task.index="0" must be a whole number'),
        (tf_config({'worker': ['a:1']}, index=0.0), 'task.index=0.0 must be a whole number'),
        ({'TF_CONFIG': ''}, 'TF_CONFIG is not set'),
        ({'TF_CONFIG': '[' * 5000}, 'TF_CONFIG is not JSON'),
        (tf_config({'worker': ['grpc://a:1']}), 'which is not "host:port"'),
        (tf_config({'worker': ['a:1 ']}), 'which is not "host:port"'),
        (tf_config({'worker': ['a: 1']}), 'which is not "host:port"'),
        (tf_config({'worker': ['a:²']}), 'which is not "host:port"'),
        (tf_config({'worker': ['a:1', 'a:1']}), 'a:1 is in cluster twice'),
        (tf_config({'chief': ['a:1'], 'worker': ['a:1']}), 'a:1 is in cluster twice'),
        (tf_config({'chief': ['a:1', 'b:1']}, 'chief'), 'there is one chief'),
        (tf_config({'worker': ['a']}), '\'a\', which is not "host:port"'),
        (tf_config({'worker': ['a:99999']}), "'a:99999', which is not"),
        (tf_config({'worker': []}), 'must be a list'),
        (tf_config({'worker': ['a:1'], 'ps': ['b:1']}), "cluster has 'ps'; only chief and worker"),
        (tf_config({}), 'cluster={} must be an object'),
        ({'SLURM_JOB_ID': '77', 'SLURM_NTASKS': '2'}, 'srun is to start it'),  # salloc
        ({'SLURM_PROCID': '0'}, "Slurm's environment does not describe"),
    ],
)
def test_every_mistake_in_the_environment_is_one_line(environment, said):
    with pytest.raises(UserError) as caught:
        read_cluster(environment)
    assert said in str(caught.value) and '\n' not in str(caught.value)


@pytest.mark.parametrize(
    'words, said',
    [
        ({'devices__input_pipelines': 'per_replica'}, 'per_replica is for one machine'),
        ({'devices__all_reduce': 'hierarchical'}, 'hierarchical is for one machine'),
        ({'devices__replicas': 2}, 'a worker without GPUs has 1 replica'),
    ],
)
def test_settings_that_several_workers_cannot_have_are_refused(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.setenv('TF_CONFIG', tf_config({'worker': ['a:1', 'b:1']})['TF_CONFIG'])
    flags = [*write_shallow(tmp_path), *overrides(devices__strategy='multi_worker', **words)]
    assert door(*flags, f'--workdir={tmp_path / "run"}') == 2
    assert said in capsys.readouterr().err


SRUN = {'SLURM_PROCID': '0', 'SLURM_STEP_NUM_TASKS': '2'}


@pytest.mark.parametrize(
    'environment, said',
    [
        (tf_config({'worker': ['a:1', 'b:1']}), 'devices.strategy=auto: TF_CONFIG names 2 workers'),
        (tf_config({'chief': ['a:1'], 'worker': ['b:1', 'c:1']}), 'TF_CONFIG names 3 workers'),
        (SRUN, 'srun started 2 tasks'),
        ({'TF_CONFIG': '{"cluster": {"worker": ["a:1", "b:1"]},}'}, 'TF_CONFIG is not JSON'),
    ],
)
def test_several_workers_are_not_left_to_train_alone_each_without_a_word(
    tmp_path, monkeypatch, capsys, environment, said
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    words = [*write_shallow(tmp_path), f'--workdir={tmp_path / "run"}', '--dry_run']
    assert door(*words) == 2
    error = capsys.readouterr().err
    assert said in error and error.count('\n') == 1
    assert '--config.devices.strategy=multi_worker' in error or 'unset it to train alone' in error
    assert door(*words, '--config.devices.strategy=one') == 0
    assert explain_input.main(words[:-1]) == 0  # only reads


@pytest.mark.parametrize(
    'environment',
    [
        {},
        tf_config({'worker': ['a:1']}),
        {'TF_CONFIG': ''},
        {'TF_CONFIG': '"for another program"'},
        {'TF_CONFIG': '[]'},
        {'TF_CONFIG': '{"cluster": []}'},
        {'SLURM_PROCID': '0', 'SLURM_NTASKS': '4'},  # a batch script without srun
        {**SRUN, 'SLURM_STEP_NUM_TASKS': '1'},
    ],
)
def test_one_worker_alone_is_none_of_several(environment):
    check_alone(environment)


TOGETHER = Cluster(('a:1', 'b:2'), 0)


@pytest.mark.parametrize(
    'error, said',
    [
        (tf.errors.UnavailableError, 'lost another worker (Socket closed)'),
        (tf.errors.AbortedError, 'lost another worker (Socket closed)'),
        (tf.errors.InternalError, None),
    ],
)
def test_an_internal_error_that_names_no_other_worker_is_no_loss(error, said):
    explained = explain_loss(error(None, None, '\nSocket closed\nmore of it'), TOGETHER)
    assert (explained and str(explained)) == (said and f'worker 0 at a:1 {said}')
    named = explain_loss(error(None, None, 'NCCL failed at /job:worker/replica:0/task:1/device:GPU:0'), TOGETHER)
    assert str(named).startswith('worker 0 at a:1 lost worker 1 at b:2 (NCCL failed at ')
    where = 'Detected at node x\n  File "a.py", line 1\n\n  File "b.py"'
    traced = f'Graph execution error:\n\n{where}\n\nSocket closed\n\t [[{{{{node x}}}}]]'
    explained = explain_loss(error(None, None, traced), TOGETHER)
    assert explained is None or '(Socket closed)' in str(explained)
    own = error(None, None, 'CUDA failed at /job:worker/replica:0/task:0/device:GPU:0')
    assert (explain_loss(own, TOGETHER) is None) == (said is None)
