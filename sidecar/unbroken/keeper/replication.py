"""What this pod's keeper has to do with those of other pods, as its agent tells it.

agent  Copying      ->  a key is made, and a listener opened      ->  CertificateRequest
       Certificate  ->  connections of others are accepted
       Restarting  ->  copies pause, until a worker says what was restored
       Unranked    ->  ... or no worker of this pod will
       Buddies      ->  senders to those who keep this pod's copies; copies are taken, and dropped
"""

import logging
import socket
import ssl
import threading
from collections.abc import Callable

from unbroken.keeper.arena import Arena
from unbroken.keeper.config import KeeperConfig
from unbroken.keeper.copies import Copies
from unbroken.keeper.copy_sender import CopySender
from unbroken.keeper.copy_server import CopyServer
from unbroken.keeper.counting import Counting
from unbroken.keeper.peer_link import Identity, Pause
from unbroken.keeper.peer_places import MAX_MEMBERS
from unbroken.keeper.pinning import Order, Pins
from unbroken.keeper.telling import Telling
from unbroken_core.pod.memory_messages import Copying, OfAgent, Restarting, Unranked
from unbroken_core.protocol.messages import Buddies, Certificate, CertificateRequest
from unbroken_core.protocol.settings import MAX_RANKS_PER_POD
from unbroken_core.vocabulary.checkpoints import MAX_COPIES_TOLD, Key, Peer
from unbroken_core.vocabulary.errors import InputError, assert_never

logger = logging.getLogger(__name__)


class Replication:
    """Obeys in one thread; `note` and `context` are used by all of the keeper's."""

    def __init__(self, config: KeeperConfig, arena: Arena, telling: Telling, counting: Counting) -> None:
        self._counting = counting
        self._config = config
        self._arena = arena
        self._telling = telling
        self._pins = Pins(arena)
        self._key = ""
        self._request = ""
        self._identity: Identity | None = None
        self._listener: socket.socket | None = None
        self._copies: Copies | None = None
        self._server: CopyServer | None = None
        self._buddies: Buddies | None = None
        self._telling_pinned = threading.Lock()
        self._guard = threading.Lock()
        """Of what other threads look at."""
        self._certified = threading.Condition(self._guard)
        self._senders: dict[Peer, CopySender] = {}
        self.pause = Pause()
        """Knows which iterations are over."""
        self._context: ssl.SSLContext | None = None

    def obey(self, message: OfAgent, ask: Callable[[CertificateRequest], None]) -> None:
        """Do what the agent says; what it says again changes nothing. Raises InputError, OSError."""
        match message:
            case Copying(copies=copies):
                self._arena.num_copies = copies
                if copies > 0:
                    self._open()
                    ask(CertificateRequest(self._request))
            case Certificate():
                self._take_certificate(message)
            case Buddies():
                self.pause.lose(message.lost)
                self._buddies = message
                self._settle()
            case Restarting(iteration=iteration):
                self.pause.begin(iteration)
            case Unranked(iteration=iteration):
                self.pause.end(iteration)
            case _:
                assert_never(message)

    def note(self) -> None:
        """Something was sealed and digested."""
        self._pins.note()
        self._tell_pinned()
        self._wake()

    def restored(self, iteration: int) -> None:
        """A worker has restored in this iteration."""
        self.pause.end(iteration)

    def _let_go(self) -> None:
        self._tell_pinned()
        self._wake()

    def _wake(self) -> None:
        with self._guard:
            senders = list(self._senders.values())
        for sender in senders:
            sender.note()

    def context(self, limit_s: float = 0.0) -> ssl.SSLContext | None:
        """Return how this pod shows who it is to others; None if it cannot, nor within this time."""
        with self._guard:
            self._certified.wait_for(lambda: self._context is not None, limit_s)
            return self._context

    def _open(self) -> None:
        if self._listener is not None:
            return
        # Only where copies are kept elsewhere: the package cryptography takes a quarter of a second to load.
        from unbroken.network.pod_certificates import make_pod_key  # noqa: PLC0415 - see above

        made = make_pod_key()
        self._key, self._request = made.key, made.request
        self._copies = Copies(self._arena, MAX_RANKS_PER_POD, on_given_up=self._telling.changed)
        self._listener = listen(self._config.host, self._config.port)
        # Told at once: until there is a certificate, who connects waits, and tries again.
        self._telling.set_port(self._listener.getsockname()[1])

    def _take_certificate(self, message: Certificate) -> None:
        if message.error:
            logger.warning("checkpoints are not copied to other pods: no certificate: %s", message.error)
            return
        identity = Identity(self._key, message.certificate, message.authority)
        if self._listener is None or self._copies is None or identity == self._identity:
            return
        server_context, client_context = identity.server_context(), identity.client_context()
        self._identity = identity
        with self._guard:
            self._context = client_context
            self._certified.notify_all()
        if self._server is None:
            self._server = CopyServer(
                self._listener,
                server_context,
                self._arena,
                self._copies,
                pause=self.pause,
                on_kept=self._telling.changed,
                count_refused=self._counting.refused,
                on_spoilt=self._counting.bad_digest,
            )
            self._server.start()
        self._server.context = server_context
        self._end_senders(lambda _peer: False)
        self._settle()

    def _settle(self) -> None:
        """Have senders to those who keep copies, and take the copies of those who are named."""
        buddies, copies, context = self._buddies, self._copies, self.context()
        if buddies is None or copies is None:
            return
        safe, following = _order(buddies.protected), _order(buddies.next_protected)
        self._pins.pin(safe, following, on_end=self._let_go)
        copies.pin(one for one in (safe, following) if one is not None)
        self._tell_pinned()
        copies.keep_for(buddies.owners)
        for owner in buddies.drop[:MAX_COPIES_TOLD]:
            copies.drop(owner)
        if buddies.drop:
            self._telling.changed()
        wanted = set(buddies.keepers)
        self._end_senders(wanted.__contains__)
        for peer in wanted:
            if context is not None and peer not in self._senders:
                self._begin(peer, context)
        self._tell()
        self._wake()

    def _begin(self, peer: Peer, context: ssl.SSLContext) -> None:
        sender = CopySender(
            peer,
            context,
            self._arena,
            ranks_per_pod=self._config.ranks_per_pod,
            bytes_per_s=self._config.copy_bytes_per_s,
            pause=self.pause,
            on_progress=self._tell,
            on_copied=self._counting.copied,
            first=lambda: self._pins.following,
            began_with=lambda moment: self._telling.load_of(moment.iteration, moment.term),
        )
        with self._guard:
            self._senders[peer] = sender
        sender.start()

    def _end_senders(self, stays: Callable[[Peer], bool]) -> None:
        with self._guard:
            ended = [peer for peer in self._senders if not stays(peer)]
            senders = [self._senders.pop(peer) for peer in ended]
        for sender in senders:
            sender.close()

    def _tell_pinned(self) -> None:
        # One at a time: what another thread has looked up before an order must not be told after it.
        with self._telling_pinned:
            buddies = self._buddies
            named = () if buddies is None else (buddies.protected, buddies.next_protected)
            self._telling.set_pinned(tuple(key for key in named if key is not None and self._pins.is_sure(key[:3])))

    def _tell(self) -> None:
        """Tell whom the newest checkpoints have not reached, and why; in any thread."""
        with self._guard:
            found = {
                peer.uid: next((one.problem for one in sender.progress.values() if one.problem), "")
                for peer, sender in self._senders.items()
            }
        self._telling.set_problems(tuple((uid, problem[:500]) for uid, problem in sorted(found.items()) if problem))


def _order(key: Key | None) -> Order | None:
    return None if key is None else key[:3]


def listen(host: str, port: int) -> socket.socket:
    """Listen for the keepers of other pods. Raises InputError.

    If another one has the port (pods may share their host's network), any; if the address is not this host's own, since
    others reach it by another one, all: who has no certificate of the job gets nothing.
    """
    problem: OSError | None = None
    for address, number in ((host, port), (host, 0), ("", port), ("", 0)):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            return socket.create_server((address, number), family=family, backlog=MAX_MEMBERS)
        except OSError as error:
            problem = error
            logger.warning("cannot listen for other keepers: address=%s port=%d error=%s", address, number, error)
    raise InputError(f"keeper: cannot listen for those of other pods at {host}: {problem}")
