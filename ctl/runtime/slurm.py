"""The workers of a job step, from the environment that Slurm gives each of its tasks."""

import contextlib
import itertools
import re
import shutil
import subprocess
from collections.abc import Mapping

from ctl.errors import UserError

# Ports of two jobs on one node should differ, and stay below those that Linux gives out by itself, from 32,768 on.
FIRST_PORT, PORTS = 10_000, 20_000
MOST_HOSTS = 100_000  # in one range


def addresses_and_index(environment: Mapping[str, str]) -> tuple[tuple[str, ...], int]:
    """host:port of every task, node by node, and which of them this process is, however Slurm has dealt their numbers.

    The environment is described at https://slurm.schedmd.com/srun.html, section "Output environment variables".

    Raises:
      UserError: when it does not describe a step that srun has started.
    """

    def get(name: str, *others: str) -> str:
        for each in (name, *others):
            if each in environment:
                return environment[each]
        raise UserError(
            f"Slurm's environment does not describe the job's tasks: {name} is not set. Start it with srun."
        )

    def number(name: str, text: str) -> int:
        if not text.isdigit():
            raise UserError(f'{name}={text}: expected a whole number, as Slurm sets it.')
        return int(text)

    hosts = host_names(get('SLURM_STEP_NODELIST', 'SLURM_STEPNODELIST'))
    tasks = tasks_per_node(get('SLURM_STEP_TASKS_PER_NODE'))
    if len(hosts) != len(tasks):
        raise UserError(f'Slurm names {len(hosts)} nodes ({", ".join(hosts[:3])}...) and tasks for {len(tasks)}.')
    job = number('SLURM_JOB_ID', get('SLURM_JOB_ID', 'SLURM_JOBID'))
    step = number('SLURM_STEP_ID', get('SLURM_STEP_ID', 'SLURM_STEPID'))
    first = FIRST_PORT + (job * 64 + step * 8) % PORTS
    addresses = [f'{host}:{first + task}' for host, count in zip(hosts, tasks, strict=True) for task in range(count)]
    node, task = (number(name, get(name)) for name in ('SLURM_NODEID', 'SLURM_LOCALID'))
    if node >= len(hosts) or task >= tasks[node]:
        raise UserError(f'SLURM_NODEID={node}, SLURM_LOCALID={task}: there is no such task among {tasks} a node.')
    return tuple(addresses), sum(tasks[:node]) + task


def host_names(text: str) -> list[str]:
    """The names in a host list, as `scontrol` has them, or where there is none as we read it: 'n[01-03,7]-ib,login'."""
    scontrol = shutil.which('scontrol')
    if scontrol:
        command = [scontrol, 'show', 'hostnames', text]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            if done.returncode == 0 and done.stdout.split():
                return done.stdout.split()
    # Commas part names, but not inside of brackets.
    names = re.findall(r'(?:[^,\[\]]|\[[^\[\]]*\])+', text)
    if not names or ','.join(names) != text:
        raise UserError(f'SLURM_STEP_NODELIST={text}: is no list of hosts like node[1-3],login.')
    return [host for name in names for host in _expand(name, text)]


def _expand(name: str, whole: str) -> list[str]:
    """One name with any number of brackets: the last one runs fastest."""
    literals, groups = re.split(r'\[[^\]]*\]', name), re.findall(r'\[([^\]]*)\]', name)
    numbers = [[number for part in group.split(',') for number in _range(part, whole)] for group in groups]
    return [
        literals[0] + ''.join(number + literal for number, literal in zip(chosen, literals[1:], strict=True))
        for chosen in itertools.product(*numbers)
    ]


def _range(text: str, whole: str) -> list[str]:
    """'08-11' is 08, 09, 10, 11."""
    found = re.fullmatch(r'(\d{1,9})(?:-(\d{1,9}))?', text, re.ASCII)
    if not found or not 0 <= int(found[2] or found[1]) - int(found[1]) < MOST_HOSTS:
        raise UserError(f'SLURM_STEP_NODELIST={whole}: {text!r} is no number, and no range of numbers.')
    return [f'{number:0{len(found[1])}}' for number in range(int(found[1]), int(found[2] or found[1]) + 1)]


def tasks_per_node(text: str) -> list[int]:
    """'2(x3),1' is 2, 2, 2, 1."""
    counts = []
    for part in text.split(','):
        found = re.fullmatch(r'(\d+)(?:\(x(\d+)\))?', part)
        if not found:
            raise UserError(f'SLURM_STEP_TASKS_PER_NODE={text}: expected counts like 2(x3),1.')
        counts += [int(found[1])] * int(found[2] or 1)
    return counts
