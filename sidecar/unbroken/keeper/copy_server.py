"""Answers the keepers of other pods: takes copies of their checkpoints, and hands out what this pod has.

One thread a connection: a second one, that compares and writes a block while the next comes, costs more than it saves
where the processors are busy.
"""

import logging
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from typing import Protocol

from unbroken.keeper.arena import Arena, SealedSlot
from unbroken.keeper.copies import Copies, NotKeptError, checksum
from unbroken.keeper.digests import read_digests
from unbroken.keeper.peer_link import LEAST_BYTES_PER_S, PATIENCE_S, Link, LinkError, Pause, accept, parts_of
from unbroken.keeper.peer_places import PeerPlace, PeerPlaces
from unbroken.keeper.rarely import Rarely
from unbroken.keeper.reading import ReadLock, SlotBusyError
from unbroken_core.pod.block_parts import Pieces, block_size, gaps_of, pieces_of
from unbroken_core.pod.memory_slots import BLOCK_BYTES, CONTENT_OFFSET, Head, digests_name, num_blocks, read_head
from unbroken_core.pod.replica_messages import (
    Declined,
    Fetch,
    Kept,
    Missing,
    Offer,
    Sending,
    ToHolder,
    Wanted,
)
from unbroken_core.protocol.bounds import MAX_BLOCKS
from unbroken_core.vocabulary.errors import assert_never

logger = logging.getLogger(__name__)

_NICE = 19


class Target(Protocol):
    """Where blocks go."""

    @property
    def content_bytes(self) -> int:
        """How much content there is in all."""

    def write(self, block: int, content: bytes | memoryview) -> None:
        """Write one block once it was compared with its digest. Raises NotKeptError, OSError."""


class CopyServer:
    """Serves until it is closed."""

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        arena: Arena,
        copies: Copies,
        *,
        pause: Pause | None = None,
        on_kept: Callable[[], None] = lambda: None,
        count_refused: Callable[[], None] = lambda: None,
        on_spoilt: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_kept` is called in the thread of a connection, once a copy is whole; `on_spoilt` where it differs."""
        self._pause = pause
        self._on_kept = on_kept
        self._count_refused = count_refused
        self._on_spoilt = on_spoilt
        self._listener = listener
        self.context = context
        """For connections from now on."""
        self._rarely = Rarely()
        self._arena = arena
        self._copies = copies
        self._places = PeerPlaces(self._refuse)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="copies", daemon=True)

    def start(self) -> None:
        """Begin to accept connections, in a thread of its own."""
        self._thread.start()

    def close(self) -> None:
        """Accept no more connections; those that are open end within a second, or when they stall."""
        self._over.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                plain, address = self._listener.accept()
            except OSError as error:
                self._rest(error)
                continue
            try:
                place = self._places.come(plain, str(address[0]))
            except OSError as error:
                plain.close()
                self._rest(error)
                continue
            if place is None:
                plain.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(plain, place), daemon=True).start()
            except RuntimeError as error:
                # The limit on processes of the pod, which its trainer may have used up.
                self._refuse(str(error))
                plain.close()
                self._places.leave(place)

    def _rest(self, error: OSError) -> None:
        """No descriptor or no memory is left: make room, and look again in a moment."""
        if self._over.is_set():
            return
        if self._rarely.may_say("not accepted"):
            logger.warning("no connection accepted: error=%s", error)
        self._places.spare_a_descriptor()
        self._over.wait(0.1)

    def _refuse(self, what: str) -> None:
        self._count_refused()
        if self._rarely.may_say("refused"):
            logger.warning("connection to the keeper's port refused: %s", what)

    def _serve(self, plain: socket.socket, place: PeerPlace) -> None:
        try:
            with closing(accept(plain, self.context)) as link:
                if not self._places.admit(place, link.pod_uid):
                    return
                while link.wait_for_frame(self._over.is_set):
                    message = link.receive(ToHolder)
                    match message:
                        case Offer():
                            self._take(link, message)
                        case Fetch():
                            self._hand_out(link, message)
                        case _:
                            assert_never(message)
        except (LinkError, OSError) as error:
            # OSError: the memory of a copy cannot be written.
            logger.info("peer's connection ended: %s", error)
        finally:
            self._places.leave(place)

    # ------------------------------------------------------------------------------------------------------------ take

    def _take(self, link: Link, offer: Offer) -> None:
        """Receive a copy. Raises LinkError when the connection cannot be used any more."""
        try:
            head = checked_head(offer.head, offer.checksums)
            receiving = self._copies.begin(link.pod_uid, offer.local_rank, head, offer.checksums, offer.began_with)
        except (NotKeptError, OSError) as error:
            link.send(Declined(str(error)[:2000], isinstance(error, NotKeptError) and error.is_soon))
            return
        if receiving is None:
            link.send(Kept())
            return
        with closing(receiving):
            link.send(Wanted())
            problem = _stand_back(lambda: receive_content(link, receiving, pause=self._pause))
            if problem:
                self._on_spoilt()
                logger.error("copy refused: owner=%s step=%d: %s", link.pod_uid[:200], head.moment.step, problem)
                link.send(Declined(problem[:2000]))
                return
            receiving.seal()
        self._on_kept()
        link.send(Kept())

    # -------------------------------------------------------------------------------------------------------- hand out

    def _hand_out(self, link: Link, wanted: Fetch) -> None:
        """Send what a reader wants. Raises LinkError."""
        for sealed in self._arena.sealed():
            moment = sealed.head.moment
            if (wanted.rank, wanted.world_size) != (sealed.head.rank, sealed.head.world_size) or (
                (wanted.term, wanted.iteration, wanted.step) != (moment.term, moment.iteration, moment.step)
            ):
                continue
            try:
                if self._send_slot(link, sealed, wanted):
                    return
            except (SlotBusyError, OSError) as error:
                logger.warning("slot not handed out: slot=%s: %s", sealed.path, error)
        link.send(Missing(f"step {wanted.step} of rank {wanted.rank} is not here"))

    def _send_slot(self, link: Link, sealed: SealedSlot, wanted: Fetch) -> bool:
        """Send blocks of one slot; False when it cannot be read. Nothing was sent then."""
        path = self._arena.reached(sealed.path)
        with ReadLock(path, sealed.head) as slot:
            if self._arena.digest(sealed.path):
                return False
            digests = read_digests(path.with_name(digests_name(path.name)), sealed.head)
            if digests is None or digests.problem:
                return False
            last = min(wanted.first_block + wanted.num_blocks, len(digests.checksums))
            pieces = _checked_pieces(wanted.ranges, sealed.head.content_bytes)
            link.send(Sending(slot.packed_head.hex(), tuple(digests.checksums), bool(wanted.ranges)))
            num_bytes = max(last - wanted.first_block, len(pieces)) * BLOCK_BYTES
            until_s = time.monotonic() + PATIENCE_S + num_bytes / LEAST_BYTES_PER_S
            try:
                if wanted.ranges:
                    _send_pieces(link, slot, pieces, sealed.head.content_bytes, until_s)
                    return True
                for block in range(wanted.first_block, last):
                    for chunk in slot.chunks(block):
                        _send_in_time(link, chunk, until_s)
            except OSError as error:
                # The reader waits for the rest: there is no place for another answer.
                raise LinkError(f"slot cannot be read on: {error}") from error
        return True


def _stand_back(receive: Callable[[], str]) -> str:
    """Do it in a thread that leaves the processors to whoever trains: none can take its priority back afterwards.

    What comes before it does not stand back: it has locks for which a restore waits.
    """
    received: Future[str] = Future()

    def run() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            received.set_result(receive())
        except BaseException as error:
            received.set_exception(error)

    try:
        threading.Thread(target=run, daemon=True).start()
    except RuntimeError:
        # The limit on processes of the pod, which its trainer may have used up.
        return receive()
    return received.result()


def _checked_pieces(ranges: tuple[tuple[int, int], ...], content_bytes: int) -> dict[int, Pieces]:
    """Return what ranges want of each block. Raises LinkError."""
    for start, length in ranges:
        if start < 0 or length <= 0 or start + length > content_bytes:
            raise LinkError(f"ranges: want parts of {content_bytes} bytes, got {length} from {start} on")
    return pieces_of(ranges, content_bytes)


def _send_in_time(link: Link, content: bytes | memoryview, until_s: float) -> None:
    """Send content, unless all of it takes too long. Raises LinkError."""
    for part in parts_of(memoryview(content)):
        if time.monotonic() > until_s:
            raise LinkError("the other side reads too slowly")
        link.send_content(part)


def _send_pieces(link: Link, slot: ReadLock, pieces: dict[int, Pieces], content_bytes: int, until_s: float) -> None:
    """Send pieces of blocks, and behind those of each block the CRC-32 of its gaps. Raises LinkError, OSError."""
    for block, found in pieces.items():
        whole = memoryview(b"".join(bytes(chunk) for chunk in slot.chunks(block)))
        gaps = [checksum(whole[first:last]) for first, last in gaps_of(found, block_size(block, content_bytes))]
        sent = [whole[first:last] for first, last in found]
        _send_in_time(link, b"".join((*sent, struct.pack(f">{len(gaps)}I", *gaps))), until_s)


def checked_head(text: str, checksums: tuple[int, ...]) -> Head:
    """Return the head that a message names. Raises NotKeptError."""
    try:
        packed = bytes.fromhex(text)
    except ValueError:
        packed = b""
    # The file is as large as the head says; how large it may become is a question of room.
    head = read_head(packed.ljust(CONTENT_OFFSET, b"\0"), CONTENT_OFFSET + MAX_BLOCKS * BLOCK_BYTES)
    if head is None:
        raise NotKeptError("head: want one of a slot, got another")
    if len(checksums) != num_blocks(head.content_bytes):
        raise NotKeptError(f"checksums: want {num_blocks(head.content_bytes)}, got {len(checksums)}")
    return head


def receive_content(link: Link, receiving: Target, blocks: range | None = None, pause: Pause | None = None) -> str:
    """Receive blocks, all by default; return what is wrong with them, "" when all is well. Raises LinkError, OSError.

    All are received, even after the first that is wrong: the connection stays of use.
    """
    buffer = memoryview(bytearray(BLOCK_BYTES))
    problem = ""
    for block in range(num_blocks(receiving.content_bytes)) if blocks is None else blocks:
        view = buffer[: min(BLOCK_BYTES, receiving.content_bytes - block * BLOCK_BYTES)]
        for part in parts_of(view):
            if pause is not None:
                pause.wait()
            link.receive_into(part)
        try:
            receiving.write(block, view)
        except NotKeptError as error:
            problem = problem or str(error)
    return problem
