"""The workers of a Slurm job: every form in which Slurm writes hosts and tasks, and two jobs on one node."""

import os

import pytest

from ctl.errors import UserError
from ctl.runtime.cluster import read_cluster
from ctl.runtime.slurm import addresses_and_index, host_names, tasks_per_node


@pytest.fixture(autouse=True)
def without_scontrol(monkeypatch, tmp_path):
    monkeypatch.setenv('PATH', str(tmp_path))


def job(node=0, task=0, **changed):
    return {
        'SLURM_JOB_ID': '4711',
        'SLURM_STEP_ID': '0',
        'SLURM_PROCID': '0',
        'SLURM_STEP_NUM_TASKS': '3',
        'SLURM_STEP_NODELIST': 'node[1-2]',
        'SLURM_STEP_TASKS_PER_NODE': '2,1',
        'SLURM_NODEID': str(node),
        'SLURM_LOCALID': str(task),
        **changed,
    }


@pytest.mark.parametrize(
    'text, hosts',
    [
        ('node1', ['node1']),
        ('node1,node2', ['node1', 'node2']),
        ('node[1-3]', ['node1', 'node2', 'node3']),
        ('node[8-11]', ['node8', 'node9', 'node10', 'node11']),
        ('node[08-11,15]', ['node08', 'node09', 'node10', 'node11', 'node15']),
        ('a,b[1-2]', ['a', 'b1', 'b2']),
        ('b[1-2],a,c[7,9]', ['b1', 'b2', 'a', 'c7', 'c9']),
        ('n[1-2]-ib', ['n1-ib', 'n2-ib']),
        ('rack[0-1]node[00-01]', ['rack0node00', 'rack0node01', 'rack1node00', 'rack1node01']),
        ('r[1,3]n[2]x.cluster.example', ['r1n2x.cluster.example', 'r3n2x.cluster.example']),
        ('tux[001-002,9]', ['tux001', 'tux002', 'tux9']),
        ('10.0.0.[1-2]', ['10.0.0.1', '10.0.0.2']),
    ],
)
def test_host_lists_are_read_in_every_form(text, hosts):
    assert host_names(text) == hosts


@pytest.mark.parametrize(
    'text', ['', ',', 'a,,b', 'node[1-', 'node]1[', 'node[]', 'node[a-b]', 'node[3-1]', 'n[1-2-3]']
)
def test_what_is_no_host_list_is_refused_in_one_line(text):
    with pytest.raises(UserError, match='SLURM_STEP_NODELIST=') as caught:
        host_names(text)
    assert '\n' not in str(caught.value)


def test_scontrol_is_asked_where_there_is_one_and_believed_where_it_answers(tmp_path):
    scontrol = tmp_path / 'scontrol'
    scontrol.write_text('#!/bin/sh\n[ "$3" = good ] || exit 1\necho first\necho second\n')
    scontrol.chmod(0o755)
    assert host_names('good') == ['first', 'second']
    assert host_names('n[1-2]') == ['n1', 'n2']


@pytest.mark.parametrize(
    'text, counts', [('1', [1]), ('2(x3)', [2, 2, 2]), ('2(x2),1', [2, 2, 1]), ('4,2(x2)', [4, 2, 2])]
)
def test_tasks_a_node_are_read_in_every_form(text, counts):
    assert tasks_per_node(text) == counts


@pytest.mark.parametrize('text', ['', 'x', '2(x', '2(3)', '1,,2', '-1'])
def test_what_are_no_tasks_a_node_is_refused(text):
    with pytest.raises(UserError, match='SLURM_STEP_TASKS_PER_NODE='):
        tasks_per_node(text)


def test_every_task_has_an_address_and_knows_which_however_its_number_was_dealt():
    """SLURM_PROCID goes round the nodes with --distribution=cyclic: it is not looked at."""
    found = [read_cluster(job(node, task, SLURM_PROCID=str(9))) for node, task in [(0, 0), (0, 1), (1, 0)]]
    assert [cluster.index for cluster in found] == [0, 1, 2]
    assert len({cluster.addresses for cluster in found}) == len({cluster.run for cluster in found}) == 1
    hosts, ports = zip(*(address.split(':') for address in found[0].addresses), strict=True)
    assert hosts == ('node1', 'node1', 'node2')
    first = int(ports[0])
    assert [int(port) - first for port in ports] == [0, 1, 0] and 10_000 <= first < 30_000


def test_jobs_and_steps_that_share_a_node_have_other_ports_and_are_other_runs():
    jobs = [job(), job(SLURM_JOB_ID='4712'), job(SLURM_STEP_ID='1')]
    assert len({addresses_and_index(each)[0][0] for each in jobs}) == 3
    assert len({read_cluster(each).run for each in jobs}) == 3


@pytest.mark.parametrize(
    'changed, said',
    [
        ({'SLURM_STEP_NODELIST': None}, 'SLURM_STEP_NODELIST is not set. Start it with srun'),
        ({'SLURM_STEP_TASKS_PER_NODE': '2'}, 'names 2 nodes (node1, node2...) and tasks for 1'),
        ({'SLURM_NODEID': '2'}, 'SLURM_NODEID=2, SLURM_LOCALID=0: there is no such task'),
        ({'SLURM_LOCALID': '2'}, 'SLURM_LOCALID=2: there is no such task'),
        ({'SLURM_JOB_ID': 'x'}, 'SLURM_JOB_ID=x: expected a whole number'),
    ],
)
def test_an_environment_that_is_not_as_slurm_sets_it_is_refused_in_one_line(changed, said):
    environment = {name: value for name, value in {**job(), **changed}.items() if value is not None}
    with pytest.raises(UserError) as caught:
        read_cluster(environment)
    assert said in str(caught.value) and '\n' not in str(caught.value)
    assert os.sep not in said
