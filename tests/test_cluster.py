"""Who takes part: what is wrong with an environment is said before TensorFlow sees it, and nobody waits for ever."""

import json
import socket
import threading

import pytest

from ctl.errors import Interrupted, UserError
from ctl.runtime.cluster import Cluster, meet, read_cluster
from tests.runs import DEADLINE, door, overrides, write_shallow
from tools.launch import free_addresses


def tf_config(cluster, kind='worker', index=0):
    return {'TF_CONFIG': json.dumps({'cluster': cluster, 'task': {'type': kind, 'index': index}})}


def test_workers_are_counted_from_the_chief():
    assert read_cluster(tf_config({'worker': ['a:1', 'b:2']}, index=1)) == Cluster(('a:1', 'b:2'), 1)
    both = {'chief': ['c:3'], 'worker': ['a:1', 'b:2']}
    assert read_cluster(tf_config(both, 'chief')) == Cluster(('c:3', 'a:1', 'b:2'), 0)
    assert read_cluster(tf_config(both, 'worker', 1)) == Cluster(('c:3', 'a:1', 'b:2'), 2)


def test_a_slurm_job_is_a_cluster():
    slurm = pytest.MonkeyPatch()
    environment = {
        'SLURM_STEP_NUM_TASKS': '2',
        'SLURM_STEP_TASKS_PER_NODE': '1(x2)',
        'SLURM_STEP_NODELIST': 'node[1-2]',
        'SLURM_PROCID': '1',
        'SLURM_NTASKS_PER_NODE': '1',
    }
    with slurm.context() as patch:
        for key, value in environment.items():
            patch.setenv(key, value)
        found = read_cluster(environment)
    assert [address.partition(':')[0] for address in found.addresses] == ['node1', 'node2']
    assert found.index == 1


@pytest.mark.parametrize(
    'environment, said',
    [
        ({}, 'TF_CONFIG is not set'),
        ({'TF_CONFIG': '{"cluster": '}, 'TF_CONFIG is not JSON'),
        ({'TF_CONFIG': '{"cluster": {"worker": ["a:1"]}}'}, 'must have cluster, task.type and task.index'),
        ({'TF_CONFIG': '[]'}, 'must have cluster'),
        (tf_config({'worker': ['a:1']}, 'master'), "task.type='master' is not in cluster, which has worker"),
        (tf_config({'worker': ['a:1']}, index=1), 'task.index=1 is not in 0 to 0'),
        (tf_config({'worker': ['a:1']}, index='0'), "task.index='0' is not in 0 to 0"),
        (tf_config({'worker': ['a:1', 'a:1']}), 'a:1 is in cluster twice'),
        (tf_config({'chief': ['a:1'], 'worker': ['a:1']}), 'a:1 is in cluster twice'),
        (tf_config({'chief': ['a:1', 'b:1']}, 'chief'), 'there is one chief'),
        (tf_config({'worker': ['a']}), '\'a\', which is not "host:port"'),
        (tf_config({'worker': ['a:99999']}), "'a:99999', which is not"),
        (tf_config({'worker': []}), 'must be a list'),
        (tf_config({'worker': ['a:1'], 'ps': ['b:1']}), "cluster has 'ps'; only chief and worker"),
        (tf_config({}), 'cluster={} must be an object'),
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


def meet_all(clusters, timeout=DEADLINE):
    """Each in a thread of its own; what was raised, and what was said, in order."""
    raised, said = [None] * len(clusters), [[] for _ in clusters]

    def run(i):
        try:
            meet(clusters[i], timeout, said[i].append)
        except (UserError, Interrupted) as error:
            raised[i] = error

    threads = [threading.Thread(target=run, args=[i]) for i in range(len(clusters))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive()
    return raised, said


def test_workers_go_on_together_when_all_are_there():
    addresses = tuple(free_addresses(3))
    raised, said = meet_all([Cluster(addresses, index) for index in (2, 1, 0)])
    assert raised == [None] * 3
    assert said[2][0].startswith(f'worker 0 at {addresses[0]}: waiting for worker 1')


def test_a_worker_that_does_not_come_is_named_by_all_that_wait():  # C32
    addresses = tuple(free_addresses(3))
    (chief, other), _ = meet_all([Cluster(addresses, 0), Cluster(addresses, 1)], timeout=2)
    assert isinstance(chief, Interrupted) and f'waited 2 s for worker 2 at {addresses[2]}' in str(chief)
    assert isinstance(other, Interrupted)
    (alone,), said = meet_all([Cluster(addresses, 1)], timeout=1)
    assert f'waited 1 s for worker 0 at {addresses[0]}' in str(alone)
    assert said == [[f'worker 1 at {addresses[1]}: waiting for worker 0 at {addresses[0]}']]


def test_two_processes_with_one_index_are_refused_by_all():
    addresses = tuple(free_addresses(3))
    raised, _ = meet_all([Cluster(addresses, 0), Cluster(addresses, 1), Cluster(addresses, 1)])
    assert all(isinstance(error, UserError) for error in raised)
    assert {str(error) for error in raised} == {
        f'two processes are worker 1 at {addresses[1]}: give each an index of its own.'
    }


def test_a_worker_of_another_cluster_is_refused():
    addresses = tuple(free_addresses(2))
    raised, _ = meet_all([Cluster(addresses, 0), Cluster((*addresses, 'a:1'), 1)])
    assert all('was given another cluster' in str(error) for error in raised)


def test_a_stranger_at_the_chiefs_door_disturbs_nobody():
    addresses = tuple(free_addresses(2))
    host, _, port = addresses[0].rpartition(':')

    def knock():
        while True:
            try:
                with socket.create_connection((host, int(port)), timeout=DEADLINE) as call:
                    call.sendall(b'GET / HTTP/1.1\r\n\r\n')
                    return
            except ConnectionRefusedError:
                continue

    stranger = threading.Thread(target=knock)
    stranger.start()
    chief = threading.Thread(target=meet, args=[Cluster(addresses, 0), DEADLINE, lambda text: None])
    chief.start()
    stranger.join()
    meet(Cluster(addresses, 1), DEADLINE, lambda text: None)
    chief.join(DEADLINE)
    assert not chief.is_alive()
