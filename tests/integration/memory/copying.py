"""Two and more pods in one process, each with an arena and a server for copies: real sockets, real TLS."""

import os
import secrets
import socket
import tempfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from unbroken.keeper.arena import Arena
from unbroken.keeper.config import KeeperConfig
from unbroken.keeper.copies import Copies
from unbroken.keeper.copy_sender import CopySender
from unbroken.keeper.copy_server import CopyServer
from unbroken.keeper.fetching import Fetcher
from unbroken.keeper.peer_link import Identity, Link, connect
from unbroken.network.pod_certificates import PodAuthority, make_pod_key
from unbroken_core.pod.memory_messages import Reserved
from unbroken_core.pod.memory_slots import CONTENT_OFFSET, Head, Moment, Sample, SlotState, pack_head
from unbroken_core.vocabulary.checkpoints import Peer

JOB = b"j" * 16


def identity(authority: PodAuthority, uid: str, trusted: PodAuthority | None = None) -> Identity:
    """Return what a pod shows after its rendezvous has vouched for it."""
    made = make_pod_key()
    return Identity(made.key, authority.issue(made.request, uid), (trusted or authority).certificate)


@dataclass
class CopyPod:
    """One pod."""

    uid: str
    root: Path
    identity: Identity
    limit_bytes: int = 256 << 20
    senders: list[CopySender] = field(default_factory=list)
    spoilt: list[str] = field(default_factory=list)
    """An entry for each copy that differed from its digests."""

    def __post_init__(self) -> None:
        config = KeeperConfig(self.root, self.root, self.uid, self.limit_bytes, 2, JOB)
        self.arena = Arena(config)
        self.copies = Copies(self.arena, max_ranks_per_pod=8)
        self.fetcher = Fetcher(self.arena)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.peer = Peer(self.uid, *self.listener.getsockname())
        context = self.identity.server_context()
        self.server = CopyServer(
            self.listener, context, self.arena, self.copies, on_spoilt=lambda: self.spoilt.append("copy")
        )
        self.server.start()

    def save(
        self,
        step: int,
        *,
        local_rank: int = 0,
        rank: int = 0,
        iteration: int = 0,
        size: int = 9 << 20,
        serial: int | None = None,
    ) -> bytes:
        """Seal a checkpoint of random bytes in the slot that does not hold the newest one; digest it."""
        content = secrets.token_bytes(size)
        reserved = self.arena.reserve(local_rank, CONTENT_OFFSET + size)
        assert isinstance(reserved, Reserved)
        path = Path(reserved.paths[step % 2])
        sample = Sample(5, 100, zlib.crc32(content[5:105]))
        moment = Moment(1, iteration, step)
        head = Head(
            SlotState.SEALED,
            step if serial is None else serial,
            JOB,
            moment,
            rank,
            4,
            b"l" * 16,
            10,
            10,
            20,
            size,
            (sample,),
        )
        descriptor = os.open(path, os.O_RDWR)
        os.pwrite(descriptor, content, CONTENT_OFFSET)
        os.pwrite(descriptor, pack_head(head) * 2, 0)
        os.close(descriptor)
        assert self.arena.digest(path) == ""
        for sender in self.senders:
            sender.note()
        return content

    def send_to(self, other: "CopyPod", bytes_per_s: float = 0.0, peer: Peer | None = None) -> CopySender:
        """Begin to copy what is saved here to another pod."""
        sender = CopySender(
            peer or other.peer, self.identity.client_context(), self.arena, ranks_per_pod=2, bytes_per_s=bytes_per_s
        )
        self.senders.append(sender)
        sender.start()
        return sender

    def connect(self, other: "CopyPod") -> Link:
        """Connect to another pod's keeper."""
        return connect((other.peer.host, other.peer.port), self.identity.client_context(), other.uid)

    def copied(self) -> dict[tuple[int, int, int], bytes]:
        """Return the content of all whole copies that this pod keeps, by (iteration, step, rank)."""
        found = {}
        for sealed in self.arena.sealed():
            if sealed.path.parent.name == "copies":
                assert self.arena.digest(sealed.path) == ""
                head = sealed.head
                content = sealed.path.read_bytes()[CONTENT_OFFSET : CONTENT_OFFSET + head.content_bytes]
                found[head.moment.iteration, head.moment.step, head.rank] = content
        return found

    def close(self) -> None:
        """End all threads."""
        for sender in self.senders:
            sender.close()
        self.server.close()
        self.arena.close()


def make_pods(*uids: str, limit_bytes: int = 256 << 20) -> list[CopyPod]:
    """Return pods of one job, on hosts of their own."""
    authority = PodAuthority("a job's key of any length", "job-uid")
    return [
        CopyPod(uid, Path(tempfile.mkdtemp(prefix="ubc-", dir="/dev/shm")), identity(authority, uid), limit_bytes)
        for uid in uids
    ]
