"""How workers find each other before TensorFlow: each calls at the chief's address, and the chief lets all go together.

Lines of JSON go back and forth:

    chief   {"challenge": ...}                                          to everyone who calls
    worker  {"worker": 1, "run": ..., "replicas": 1, "challenge": ..., "proof": ...}
    chief   {"go": true, "proof": ...} when all are there, or {"refused": ...} at once

`run` is a digest of the addresses, the job and the run. A proof is an HMAC of the other's challenge with CTL_SECRET,
where the environment has one: it shows that its sender knows the secret, and does not say it. Whoever else calls is
told so, and disturbs nobody.
"""

import contextlib
import hashlib
import hmac
import json
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from typing import NamedTuple

from ctl.errors import Interrupted, UserError
from ctl.runtime.cluster import Cluster

# A caller says who it is in so many seconds and bytes; so many may be there at once.
SECONDS, BYTES, CALLERS = 5.0, 2000, 500
# Kinds of strangers that are named one by one.
MOST_STRANGERS = 5
MOST_NAMED = 10  # of the missing


def meet(cluster: Cluster, timeout: float, say: Callable[[str], None], replicas: int = 1, secret: str = '') -> None:
    """Returns when all workers are there.

    Args:
      timeout: seconds to wait for them.
      say: is told whom this one waits for, and who has called that is none of the run.
      replicas: of this worker.
      secret: that all must know; '' for none.

    Raises:
      Interrupted: when not all are there in time; names those that are missing.
      UserError: when another process is the same worker, or this one was given another cluster, run or secret.
    """
    me = _Self(cluster, replicas, secret)
    end = time.monotonic() + timeout
    if cluster.chief:
        with contextlib.ExitStack() as stack:
            _Door(me, say, stack).wait(end, timeout)
    else:
        _call_the_chief(me, end, timeout, say)


class _Self(NamedTuple):
    """This worker, as it speaks to others."""

    cluster: Cluster
    replicas: int
    secret: str

    @property
    def run(self) -> str:
        parts = [*self.cluster.addresses, self.cluster.run]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def proof(self, challenge: str, who: str) -> str:
        """That the secret is known here, for the one who gave the challenge; '' where there is none."""
        if not self.secret:
            return ''
        text = f'{who} {self.run} {challenge}'.encode(errors='replace')
        return hmac.new(self.secret.encode(), text, 'sha256').hexdigest()

    def proves(self, proof: object, challenge: str, who: str) -> bool:
        expected = self.proof(challenge, who).encode()
        return isinstance(proof, str) and hmac.compare_digest(proof.encode(errors='replace'), expected)


class _Caller:
    """A connection to the chief, and what has come through it."""

    def __init__(self, connection: socket.socket, host: str):
        self.connection, self.host = connection, host
        self.challenge = secrets.token_hex(16)
        self.until = time.monotonic() + SECONDS
        self.text = b''
        self.said: dict | None = None  # who it is, once it has been let in

    def send(self, **what: object) -> None:
        with contextlib.suppress(OSError):  # it may be gone
            self.connection.sendall(json.dumps(what).encode() + b'\n')

    def receive(self) -> bool:
        """Takes what has come; whether the other end is still there."""
        try:
            more = self.connection.recv(BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.text += more
        return bool(more)


class _Refused(Exception):
    """Why a caller is none of us."""


class _Disagreement(Exception):
    """What a worker of this run does otherwise: none can go on."""


class _Door:
    """The chief's: takes calls side by side, and lets in who belongs to the run."""

    def __init__(self, me: _Self, say: Callable[[str], None], stack: contextlib.ExitStack):
        self._me, self._say, self._stack = me, say, stack
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self._workers: dict[int, _Caller] = {}
        self._strangers: dict[str, None] = {}
        port = _host_and_port(me.cluster.addresses[0])[1]
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        try:
            server = socket.create_server(('', port), family=family, backlog=CALLERS, dualstack_ipv6=both)
            self._listener = stack.enter_context(server)
        except OSError as error:
            raise UserError(f'{me.cluster.name(0)}: this machine cannot listen there: {error.strerror}.') from None
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, None)

    def wait(self, end: float, timeout: float) -> None:
        """Until all are there, and lets them go."""
        cluster, said = self._me.cluster, ''
        while missing := [i for i in range(1, len(cluster.addresses)) if i not in self._workers]:
            more = f' and {len(missing) - MOST_NAMED} more' if len(missing) > MOST_NAMED else ''
            text = ', '.join(map(cluster.name, missing[:MOST_NAMED])) + more
            if text != said:
                self._say(f'waiting for {text}')
                said = text
            if time.monotonic() > end:
                strangers = f'; others have called: {"; ".join(self._strangers)}' if self._strangers else ''
                named = (cluster.addresses[i] for i in missing[:MOST_NAMED])
                unknown = next(filter(None, map(_unknown, named)), '')
                raise Interrupted(f'waited {timeout:g} s for {text} (devices.start_timeout){unknown}{strangers}')
            self._look()
        for caller in self._workers.values():
            caller.send(go=True, proof=self._me.proof(caller.said['challenge'], 'chief'))

    def _look(self) -> None:
        for key, _ in self._selector.select(timeout=0.5):
            if key.data is None:
                self._accept()
            elif not key.data.receive():
                self._leave(key.data, '' if key.data.said or not key.data.text else 'went away in mid-sentence')
            elif key.data.said is None and (b'\n' in key.data.text or len(key.data.text) >= BYTES):
                self._hear(key.data)
        now = time.monotonic()
        for key in list(self._selector.get_map().values()):
            if key.data and key.data.said is None and now > key.data.until:
                self._leave(key.data, 'said nothing' if not key.data.text else 'did not come to an end')

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, (host, *_) = self._listener.accept()
            if sum(not (key.data and key.data.said) for key in self._selector.get_map().values()) > CALLERS:
                connection.close()
                return
            connection.setblocking(False)
            # A machine that is gone says nothing: its place is free after a minute.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (('TCP_KEEPIDLE', 20), ('TCP_KEEPINTVL', 10), ('TCP_KEEPCNT', 4)):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
            caller = _Caller(self._stack.enter_context(connection), host.removeprefix('::ffff:'))
            self._selector.register(connection, selectors.EVENT_READ, caller)
            caller.send(challenge=caller.challenge)

    def _hear(self, caller: _Caller) -> None:
        """Lets a caller in, or tells it why not."""
        try:
            said = self._understand(caller.text, caller.challenge)
        except _Refused as why:
            caller.send(refused=str(why))
            self._leave(caller, str(why))
            return
        except _Disagreement as what:
            for each in (caller, *self._workers.values()):
                each.send(refused=str(what))
            raise UserError(str(what)) from None
        before = self._workers.get(said['worker'])
        # One that died while others were awaited has closed its connection, which may not have been seen yet.
        if before and before.receive():
            why = f'two processes are {self._me.cluster.name(said["worker"])}: give each an index of its own.'
            caller.send(refused=why)
            self._leave(caller, why)
            return
        if before:
            self._leave(before, '')
        caller.said = said
        self._workers[said['worker']] = caller

    def _understand(self, text: bytes, challenge: str) -> dict:
        """Who calls, by what it has said."""
        me, cluster = self._me, self._me.cluster
        try:
            said = json.loads(text)
            index, run, replicas = (said[key] for key in ('worker', 'run', 'replicas'))
            theirs, proof = said['challenge'], said['proof']
        except (ValueError, TypeError, KeyError, RecursionError):
            raise _Refused('speaks otherwise than a worker of ctl') from None
        if run != me.run:
            raise _Refused(f'worker {str(index)[:9]} was given another cluster or run than {cluster.name(0)}')
        if type(index) is not int or not 0 < index < len(cluster.addresses) or not isinstance(theirs, str):
            raise _Refused(f'worker {str(index)[:9]} is not in 1 to {len(cluster.addresses) - 1}')
        if not me.proves(proof, challenge, f'worker {index}'):
            known = 'does not know the CTL_SECRET of' if me.secret else 'has a CTL_SECRET, and there is none at'
            raise _Refused(f'{cluster.name(index)} {known} {cluster.name(0)}: give all the same')
        if replicas != me.replicas:
            raise _Disagreement(
                f'{cluster.name(index)} has {replicas} replicas and {cluster.name(0)} {me.replicas}: give all as many '
                'GPUs, or set devices.replicas.'
            )
        return said

    def _leave(self, caller: _Caller, problem: str) -> None:
        """Closes a connection; of a stranger's it is said once why."""
        if caller.connection.fileno() < 0:  # left already, in what the same look has found
            return
        self._selector.unregister(caller.connection)
        caller.connection.close()
        if caller.said:
            self._workers = {index: each for index, each in self._workers.items() if each is not caller}
        stranger = f'{caller.host} {problem}'
        if problem and stranger not in self._strangers and len(self._strangers) < MOST_STRANGERS:
            self._strangers[stranger] = None
            self._say(f'{self._me.cluster.name(0)}: {stranger}; it is let go, and the others are waited for.')


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(':')
    return host.strip('[]'), int(port)  # an IPv6 address stands in brackets


def _unknown(address: str) -> str:
    """What to add where nobody knows the machine of an address by its name; else ''. Names may come late."""
    host, port = _host_and_port(address)
    try:
        socket.getaddrinfo(host, port)
    except OSError as error:
        return f'; {host} is not known here: {error.strerror}'
    return ''


def _call_the_chief(me: _Self, end: float, timeout: float, say: Callable[[str], None]) -> None:
    chief, said = me.cluster.name(0), False
    while time.monotonic() < end:
        if _call(me, end):
            return
        if not said:
            say(f'waiting for {chief}')
            said = True
        time.sleep(0.2)
    unknown = _unknown(me.cluster.addresses[0])
    raise Interrupted(f'waited {timeout:g} s for {chief}, or for the others with it (devices.start_timeout){unknown}')


def _call(me: _Self, end: float) -> bool:
    """Calls once, and waits until all are let go; False where the chief is not there, or not any more."""
    cluster, mine = me.cluster, secrets.token_hex(16)
    chief, patience = _host_and_port(cluster.addresses[0]), max(0.1, end - time.monotonic())
    try:
        with socket.create_connection(chief, timeout=patience) as connection:
            lines = connection.makefile('rb')
            challenge = json.loads(lines.readline(BYTES))['challenge']
            proof = me.proof(challenge, f'worker {cluster.index}')
            says = {'worker': cluster.index, 'run': me.run, 'replicas': me.replicas, 'challenge': mine, 'proof': proof}
            connection.sendall(json.dumps(says).encode() + b'\n')
            connection.settimeout(max(0.1, end - time.monotonic()))
            answer = json.loads(lines.readline(BYTES))
            refused, answered = answer.get('refused'), answer.get('proof')
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return False
    if refused:
        raise UserError(str(refused))
    if not me.proves(answered, mine, 'chief'):
        known = 'does not know the CTL_SECRET' if me.secret else 'has a CTL_SECRET, and there is none'
        raise UserError(
            f'who answers as {cluster.name(0)} {known} of {cluster.name(cluster.index)}: give all the same.'
        )
    return True
