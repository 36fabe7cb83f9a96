"""Sends what was sealed to one other pod: the newest of each worker, again and again until it is kept there.

One thread a buddy. A worker that wants to overwrite what is being sent skips that save, so that a slow network
protects fewer steps rather than none.
"""

import logging
import os
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from unbroken.keeper.arena import Arena
from unbroken.keeper.digests import read_digests, read_slot_head
from unbroken.keeper.peer_link import Link, LinkError, Pause, connect, parts_of
from unbroken.keeper.pinning import Order
from unbroken.keeper.reading import ReadLock, SlotBusyError
from unbroken_core.pod.memory_slots import NUM_SLOTS, Head, Moment, SlotState, digests_name, slot_name
from unbroken_core.pod.replica_messages import AfterContent, Declined, Offer, ToOwner, Wanted
from unbroken_core.vocabulary.checkpoints import Load, Peer

logger = logging.getLogger(__name__)

_NICE = 19
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0


@dataclass(frozen=True)
class CopyProgress:
    """What a buddy has of one worker's checkpoints."""

    kept: Moment | None = None
    """The newest that it has verified."""
    problem: str = ""
    """Why the newest is not there; "" while all goes well."""


class CopySender:
    """Sends to one pod until it is closed."""

    def __init__(
        self, peer: Peer, context: ssl.SSLContext, arena: Arena, *, ranks_per_pod: int, bytes_per_s: float = 0.0,
        on_progress: Callable[[], None] = lambda: None, began_with: Callable[[Moment], Load | None] = lambda _: None,
        on_copied: Callable[[int], None] = lambda _: None, first: Callable[[], Order | None] = lambda: None,
        pause: Pause | None = None,
    ) -> None:  # fmt: skip
        """`bytes_per_s`: at most so many on average, 0 for no limit. `on_progress` is called in the sender's thread.

        `began_with` returns what the iteration of a checkpoint went back to. `on_copied` is told the bytes of each one
        that was sent, and is kept. `first` returns the step that goes before all that is newer, if it is here.
        """
        self._pause = Pause() if pause is None else pause
        self._first = first
        self._on_copied = on_copied
        self._began_with = began_with
        self.peer = peer
        self._context = context
        self._arena = arena
        self._ranks_per_pod = ranks_per_pod
        self._bytes_per_s = bytes_per_s
        self._on_progress = on_progress
        self._progress: dict[int, CopyProgress] = {}
        self._logged = ""
        """Why a copy was declined, as it was logged last."""
        self._news = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"copies-to-{peer.uid}"[:64], daemon=True)

    def start(self) -> None:
        """Begin, in a thread of its own."""
        self._thread.start()

    def note(self) -> None:
        """Something was sealed and digested."""
        self._news.set()

    def close(self) -> None:
        """Stop at the next chunk. Does not wait for it."""
        self._over.set()
        self._news.set()

    @property
    def progress(self) -> dict[int, CopyProgress]:
        """By local rank."""
        return dict(self._progress)

    def _run(self) -> None:
        # This thread alone: it leaves the processors to whoever trains.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        link: Link | None = None
        pause_s = _FIRST_PAUSE_S
        while not self._over.is_set():
            self._news.clear()
            due = self._due()
            if not due:
                pause_s = _FIRST_PAUSE_S
                self._news.wait()
                continue
            try:
                if link is None:
                    link = connect((self.peer.host, self.peer.port), self._context, self.peer.uid)
                is_kept = [self._send(link, *one) for one in due]
                if not all(is_kept) and not any(one.problem for one in self._progress.values()):
                    # Busy, or told to come back soon.
                    self._over.wait(_FIRST_PAUSE_S)
                    continue
            except (LinkError, OSError) as error:
                if link is not None:
                    link.close()
                    link = None
                self._note_problem(str(error))
                is_kept = [False]
            if all(is_kept):
                pause_s = _FIRST_PAUSE_S
            else:
                # Also after what was declined: the other side may have room, or the slot be free, a moment later.
                self._over.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        if link is not None:
            link.close()

    def _due(self) -> list[tuple[int, Path, Head]]:
        """Return the newest digested checkpoint of each worker that the buddy has not."""
        due = []
        for local_rank in range(self._ranks_per_pod):
            newest = self._newest(local_rank)
            kept = self._progress.get(local_rank, CopyProgress()).kept
            if newest is not None and (kept is None or kept != newest[1].moment):
                due.append((local_rank, *newest))
        return due

    def _newest(self, local_rank: int) -> tuple[Path, Head] | None:
        own = (self._arena.folder / slot_name(local_rank, index) for index in range(NUM_SLOTS))
        paths = [self._arena.reached(path) for path in own]
        found = [(path, head) for path in paths if (head := read_slot_head(path)) is not None]
        sealed = [
            (path, head)
            for path, head in found
            if head.state is SlotState.SEALED
            and head.job == self._arena.job
            and self._checksums(path, head) is not None
        ]
        wanted = self._first()
        first = [one for one in sealed if one[1].moment.order == wanted]
        return max(first or sealed, key=lambda one: one[1].moment.order, default=None)

    def _checksums(self, path: Path, head: Head) -> tuple[int, ...] | None:
        digests = read_digests(path.with_name(digests_name(path.name)), head)
        return None if digests is None or digests.problem else tuple(digests.checksums)

    def _send(self, link: Link, local_rank: int, path: Path, head: Head) -> bool:
        """Send one checkpoint; return whether it is kept now. Raises LinkError, OSError."""
        checksums = self._checksums(path, head)
        if checksums is None:
            return False
        try:
            with ReadLock(path, head) as slot:
                link.send(Offer(local_rank, slot.packed_head.hex(), checksums, self._began_with(head.moment)))
                answer, num_sent = link.receive(ToOwner), 0
                if isinstance(answer, Wanted):
                    self._send_content(link, slot, len(checksums))
                    answer, num_sent = link.receive(AfterContent), head.content_bytes
        except SlotBusyError:
            # A newer one is on its way.
            return False
        if isinstance(answer, Declined) and answer.is_soon:
            return False
        if isinstance(answer, Declined):
            before = self._progress.get(local_rank, CopyProgress())
            # Not the first time: a buddy that was just chosen may hear of it a moment after this pod.
            if before.problem and answer.reason != self._logged:
                self._logged = answer.reason
                logger.warning("copy declined: to=%s step=%d: %s", self.peer.uid, head.moment.step, answer.reason)
            self._set(local_rank, CopyProgress(before.kept, answer.reason))
            return False
        self._logged = ""
        self._on_copied(num_sent)
        self._set(local_rank, CopyProgress(head.moment))
        return True

    def _send_content(self, link: Link, slot: ReadLock, num_blocks: int) -> None:
        began_s, num_bytes = time.monotonic(), 0
        for block in range(num_blocks):
            for chunk in slot.chunks(block):
                for part in parts_of(chunk):
                    self._pause.wait()
                    link.send_content(part)
                num_bytes += len(chunk)
                if self._over.is_set():
                    raise LinkError("copies go elsewhere now")
                if self._bytes_per_s:
                    ahead_s = num_bytes / self._bytes_per_s - (time.monotonic() - began_s)
                    if ahead_s > 0:
                        self._over.wait(min(ahead_s, 1.0))

    def _note_problem(self, problem: str) -> None:
        if self._is_news(problem):
            logger.warning("checkpoints not copied: to=%s: %s", self.peer.uid, problem)
        for local_rank in range(self._ranks_per_pod):
            self._set(local_rank, CopyProgress(self._progress.get(local_rank, CopyProgress()).kept, problem))

    def _is_news(self, problem: str) -> bool:
        """Return whether to log it: it may be the same again and again."""
        return all(one.problem != problem for one in self._progress.values())

    def _set(self, local_rank: int, progress: CopyProgress) -> None:
        if self._progress.get(local_rank) != progress:
            self._progress[local_rank] = progress
            self._on_progress()
