"""How workers meet: all go on together, nobody waits for ever, and whoever else calls disturbs nobody."""

import contextlib
import json
import socket
import threading
import time

import pytest

from ctl.errors import Interrupted, UserError
from ctl.runtime import meeting
from ctl.runtime.cluster import Cluster
from ctl.runtime.meeting import meet
from tests.runs import DEADLINE
from tools.launch import free_addresses


def meet_all(clusters, timeout=DEADLINE, each=({}, {}, {}, {})):
    """Each in a thread of its own; what was raised, and what was said, in order."""
    raised, said = [None] * len(clusters), [[] for _ in clusters]

    def run(i):
        try:
            meet(clusters[i], timeout[i] if isinstance(timeout, tuple) else timeout, said[i].append, **each[i])
        except (UserError, Interrupted) as error:
            raised[i] = error

    threads = [threading.Thread(target=run, args=[i]) for i in range(len(clusters))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive()
    return raised, said


@contextlib.contextmanager
def waiting(cluster, **how):
    """A worker that waits in a thread, as long as the `with`; what it says, and what it raises."""
    said, raised = [], []

    def run():
        try:
            meet(cluster, DEADLINE, said.append, **how)
        except (UserError, Interrupted) as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield said, raised
    thread.join(DEADLINE)
    assert not thread.is_alive()


def wait_until(true):
    end = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def call(addresses):
    """A connection to the chief, once it listens."""
    host, _, port = addresses[0].rpartition(':')
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection((host, int(port)), timeout=DEADLINE)


def answer(connection, text):
    """The chief's answer to what a stranger says, '' where it hangs up."""
    lines = connection.makefile('rb')
    challenge = json.loads(lines.readline())['challenge']
    connection.sendall(text(challenge) if callable(text) else text)
    return lines.readline().decode()


def test_workers_go_on_together_when_all_are_there():
    addresses = tuple(free_addresses(3))
    raised, said = meet_all([Cluster(addresses, index) for index in (2, 1, 0)])
    assert raised == [None] * 3
    assert said[2][0].startswith('waiting for worker 1')


def test_a_worker_that_does_not_come_is_named_by_all_that_wait():  # C32
    addresses = tuple(free_addresses(3))
    (chief, other), _ = meet_all([Cluster(addresses, 0), Cluster(addresses, 1)], timeout=(2, 4))
    assert isinstance(chief, Interrupted) and f'waited 2 s for worker 2 at {addresses[2]}' in str(chief)
    assert isinstance(other, Interrupted)
    (alone,), said = meet_all([Cluster(addresses, 1)], timeout=1)
    assert f'waited 1 s for worker 0 at {addresses[0]}' in str(alone)
    assert said == [[f'waiting for worker 0 at {addresses[0]}']]


def test_a_machine_that_nobody_knows_by_its_name_is_said_in_the_end():  # names of pods may come late
    mine, nowhere = free_addresses(1)[0], 'nowhere.invalid:1'
    (chief,), _ = meet_all([Cluster((mine, nowhere), 0)], timeout=1)
    (other,), _ = meet_all([Cluster((nowhere, mine), 1)], timeout=1)
    assert 'nowhere.invalid is not known here' in str(chief) and 'nowhere.invalid is not known here' in str(other)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason='needs IPv6')
def test_workers_find_each_other_by_addresses_of_either_kind():
    ports = [address.rpartition(':')[2] for address in free_addresses(2)]
    for host in ('[::1]', '127.0.0.1'):
        addresses = tuple(f'{host}:{port}' for port in ports)
        assert meet_all([Cluster(addresses, index) for index in (0, 1)])[0] == [None, None]


def test_a_second_process_with_an_index_is_refused_and_the_others_go_on():
    addresses = tuple(free_addresses(3))
    with waiting(Cluster(addresses, 0)) as (said, raised), waiting(Cluster(addresses, 1)) as (_, raised_by_one):
        wait_until(lambda: said and said[-1].endswith(f'waiting for worker 2 at {addresses[2]}'))
        with pytest.raises(UserError, match=f'two processes are worker 1 at {addresses[1]}: give each an index of'):
            meet(Cluster(addresses, 1), DEADLINE, print)
        meet(Cluster(addresses, 2), DEADLINE, print)
    assert raised == raised_by_one == []


def test_a_worker_that_died_while_others_were_awaited_may_come_back():
    addresses = tuple(free_addresses(3))
    with waiting(Cluster(addresses, 0)) as (said, raised):
        with pytest.raises(Interrupted):  # gone, after it was let in
            meet(Cluster(addresses, 1), 1.0, print)
        raised_by_others, _ = meet_all([Cluster(addresses, 1), Cluster(addresses, 2)])
    assert raised == [] and raised_by_others == [None, None]


@pytest.mark.parametrize('other', [{'addresses': 'a:1'}, {'run': 'another job'}])
def test_a_worker_of_another_cluster_or_run_is_refused_and_ends_nothing_but_itself(other):
    addresses = tuple(free_addresses(2))
    theirs = Cluster((*addresses, 'a:1') if 'addresses' in other else addresses, 1, other.get('run', ''))
    with waiting(Cluster(addresses, 0)) as (said, raised):
        with pytest.raises(
            UserError, match=f'worker 1 was given another cluster or run than worker 0 at {addresses[0]}'
        ):
            meet(theirs, DEADLINE, print)
        meet(Cluster(addresses, 1), DEADLINE, print)
    assert raised == []
    assert [line for line in said if 'was given another' in line and 'the others are waited for' in line]


@pytest.mark.slow
def test_workers_with_different_numbers_of_gpus_are_refused_all():
    addresses = tuple(free_addresses(3))
    each = [{'replicas': 2}, {'replicas': 2}, {'replicas': 4}]
    raised, _ = meet_all([Cluster(addresses, i) for i in range(3)], timeout=10, each=each)
    wrong = f'worker 2 at {addresses[2]} has 4 replicas and worker 0 at {addresses[0]} 2: give all as many GPUs'
    assert isinstance(raised[0], UserError) and wrong in str(raised[0])
    assert wrong in str(raised[2])


def as_worker(index=1, run=None, proof='', **more):
    """What a worker of two says, given the chief's challenge."""

    def text(challenge):
        run_of_two = run if run is not None else meeting._Self(Cluster(as_worker.addresses), 1, '').run
        says = {'worker': index, 'run': run_of_two, 'replicas': 1, 'challenge': 'c', 'proof': proof, **more}
        return json.dumps(says).encode() + b'\n'

    return text


@pytest.mark.parametrize(
    'text, said',
    [
        (b'GET / HTTP/1.1\r\n\r\n', 'speaks otherwise than a worker of ctl'),
        (b'[1, 2]\n', 'speaks otherwise'),
        (b'{}\n', 'speaks otherwise'),
        (b'\x16\x03\x01\x02\x00\n', 'speaks otherwise'),
        (b'x' * 5000, 'speaks otherwise'),
        (b'[' * 1999 + b'\n', 'speaks otherwise'),
        (as_worker(run='0' * 64), 'worker 1 was given another cluster or run'),
        (as_worker(run=7), 'was given another cluster or run'),
        (as_worker(index=2), 'worker 2 is not in 1 to 1'),
        (as_worker(index=0), 'worker 0 is not in 1 to 1'),
        (as_worker(index=-1), 'worker -1 is not in 1 to 1'),
        (as_worker(index=True), 'worker True is not in 1 to 1'),
        (as_worker(index='x' * 1000), 'worker xxxxxxxxx is not in 1 to 1'),
        (as_worker(proof='0' * 64), 'has a CTL_SECRET, and there is none at worker 0'),
        (as_worker(proof='\u00e9\ud800'), 'has a CTL_SECRET, and there is none at worker 0'),
        (as_worker(proof=None), 'has a CTL_SECRET, and there is none at worker 0'),
    ],
)
def test_a_stranger_is_told_so_and_named_once_and_disturbs_nobody(text, said):
    addresses = tuple(free_addresses(2))
    as_worker.addresses = addresses
    with waiting(Cluster(addresses, 0)) as (heard, raised):
        for _ in range(2):
            with call(addresses) as connection:
                assert said in answer(connection, text)
        meet(Cluster(addresses, 1), DEADLINE, print)
    assert raised == []
    (line,) = [line for line in heard if 'is let go' in line]
    assert said in line and '127.0.0.1' in line


def test_who_called_is_named_when_the_right_one_does_not_come():
    addresses = tuple(free_addresses(2))
    with call_later(addresses, b'GET / HTTP/1.1\r\n\r\n'):
        (error,), _ = meet_all([Cluster(addresses, 0)], timeout=3)
    assert str(error).endswith('others have called: 127.0.0.1 speaks otherwise than a worker of ctl')


@contextlib.contextmanager
def call_later(addresses, text):
    def run():
        with call(addresses) as connection:
            answer(connection, text)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join(DEADLINE)


def test_hundreds_that_say_nothing_and_half_a_message_hold_nobody_up(monkeypatch):
    addresses = tuple(free_addresses(3))
    with contextlib.ExitStack() as stack, waiting(Cluster(addresses, 0)) as (said, raised):
        silent = [stack.enter_context(call(addresses)) for _ in range(200)]
        silent[0].sendall(b'{"worker": 1,')
        raised_by_others, _ = meet_all([Cluster(addresses, 1), Cluster(addresses, 2)])
    assert raised == [] and raised_by_others == [None, None]


def test_who_says_nothing_is_let_go_after_a_while(monkeypatch):
    monkeypatch.setattr(meeting, 'SECONDS', 0.2)
    addresses = tuple(free_addresses(2))
    with waiting(Cluster(addresses, 0)) as (said, raised):
        with call(addresses) as silent, call(addresses) as halting:
            halting.sendall(b'{"worker": 1,')
            assert all(each.makefile('rb').read().count(b'\n') == 1 for each in (silent, halting))  # the challenge
        meet(Cluster(addresses, 1), DEADLINE, print)
    problems = ' '.join(line for line in said if 'is let go' in line)
    assert 'said nothing' in problems and 'did not come to an end' in problems


SECRETS = [{'secret': 'open sesame'}, {'secret': 'open sesame'}]


def test_who_knows_the_secret_is_let_in_and_says_it_to_nobody():
    addresses = tuple(free_addresses(2))
    raised, _ = meet_all([Cluster(addresses, i) for i in range(2)], each=SECRETS)
    assert raised == [None, None]
    with waiting(Cluster(addresses, 0), **SECRETS[0]), call(addresses) as connection:
        lines = connection.makefile('rb')
        assert b'sesame' not in lines.readline()
        meet(Cluster(addresses, 1), DEADLINE, print, **SECRETS[1])


@pytest.mark.parametrize(
    'chiefs, workers, said',
    [
        ('right', 'wrong', 'does not know the CTL_SECRET of worker 0'),
        ('right', '', 'does not know the CTL_SECRET of worker 0'),
        ('', 'right', 'has a CTL_SECRET, and there is none at worker 0'),
    ],
)
def test_another_secret_or_none_is_said_on_both_sides(chiefs, workers, said):
    addresses = tuple(free_addresses(2))
    with waiting(Cluster(addresses, 0), secret=chiefs) as (heard, raised):
        with pytest.raises(UserError, match=said):
            meet(Cluster(addresses, 1), DEADLINE, print, secret=workers)
        meet(Cluster(addresses, 1), DEADLINE, print, secret=chiefs)
    assert raised == [] and any(said in line for line in heard)


def test_a_chief_that_does_not_know_the_secret_is_not_believed():
    """Whoever listens there first could let a worker go to where it likes."""
    with socket.create_server(('127.0.0.1', 0)) as server:
        addresses = (f'127.0.0.1:{server.getsockname()[1]}', 'b:1')

        def answer_all():
            connection, _ = server.accept()
            with connection:
                connection.sendall(b'{"challenge": "0"}\n')
                connection.makefile('rb').readline()
                connection.sendall(b'{"go": true, "proof": ""}\n')

        thread = threading.Thread(target=answer_all)
        thread.start()
        with pytest.raises(UserError, match='who answers as worker 0 at .* does not know the CTL_SECRET of worker 1'):
            meet(Cluster(addresses, 1), DEADLINE, print, secret='right')
        thread.join(DEADLINE)
