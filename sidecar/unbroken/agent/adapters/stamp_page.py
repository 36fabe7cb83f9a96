"""Files that the pod's workers write and the agent reads: the page of stamps, and stacks.

Whoever may write the page may truncate it. A process that then reads a mapping of it is killed (SIGBUS), so the agent
maps nothing that it reads: it asks the kernel for the bytes, and mends the file where they are missing.
"""

import logging
import os
from pathlib import Path

from unbroken.agent.adapters.access import shared_mode
from unbroken.agent.adapters.clearing import clear
from unbroken_core.pod.stacks import MAX_STACK_BYTES, parse_stack, stack_path
from unbroken_core.pod.stamps import WorkerStamps, pack_header, page_bytes, unpack_slot
from unbroken_core.protocol.bounds import MAX_NUMBER, MAX_SECONDS

logger = logging.getLogger(__name__)

_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class StampPage:
    """An open page. An existing file is kept: running workers have it mapped."""

    def __init__(self, path: Path, num_slots: int) -> None:
        """Open the page, or make one in place of whatever else has its name."""
        self._path = path
        self._num_slots = num_slots
        self._is_mended = False
        descriptor = _opened(path, num_slots)
        if descriptor is None:
            # Complete it under another name first: a worker must never map a page that is too short.
            part = path.with_name(f"{path.name}.{os.getpid()}")
            clear(part)
            part.write_bytes(_empty(num_slots))
            part.chmod(shared_mode(path.parent))
            clear(path)
            part.replace(path)
            descriptor = os.open(path, _FLAGS)
        self._descriptor = descriptor
        self._bytes()

    def read(self) -> tuple[WorkerStamps, ...]:
        """Return the stamps of all places in local order; they are from the trainer, and bounded, but may be false."""
        first, second = self._bytes(), self._bytes()
        return tuple(_slot(first, second, rank) for rank in range(self._num_slots))

    def close(self) -> None:
        """Close the page; the file stays."""
        os.close(self._descriptor)

    def _bytes(self) -> bytes:
        size, header = page_bytes(self._num_slots), pack_header(self._num_slots)
        found = os.pread(self._descriptor, size, 0)
        if len(found) == size and found.startswith(header):
            return found
        if not self._is_mended:
            self._is_mended = True
            text = "page of stamps repaired, hangs may go unnoticed: path=%s want_bytes=%d got_bytes=%d"
            logger.warning(text, self._path, size, len(found))
        try:
            os.pwrite(self._descriptor, header, 0)
            if len(found) < size:
                os.ftruncate(self._descriptor, size)
        except OSError as error:
            logger.debug("page of stamps not mended: error=%s", error)
        return found.ljust(size, b"\0")


def _empty(num_slots: int) -> bytes:
    return pack_header(num_slots).ljust(page_bytes(num_slots), b"\0")


def _opened(path: Path, num_slots: int) -> int | None:
    """Return a descriptor of a page of this layout; None when there is none."""
    try:
        descriptor = os.open(path, _FLAGS)
    except OSError:
        return None
    try:
        if os.pread(descriptor, page_bytes(num_slots) + 1, 0)[: len(pack_header(num_slots))] == pack_header(num_slots):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def _slot(first: bytes, second: bytes, local_rank: int) -> WorkerStamps:
    """Return a worker's stamps, as two looks in a row have seen them.

    The kernel does not promise to copy a number while it is written in one piece: a time that was torn is older than
    the other look's, and one of the future is no older than now.
    """
    earlier, later = unpack_slot(first, local_rank), unpack_slot(second, local_rank)
    return WorkerStamps(
        later.pid,
        later.iteration,
        max(earlier.alive_ns, later.alive_ns),
        max(earlier.main_ns, later.main_ns),
        max(earlier.ping_ns, later.ping_ns),
        min(max(later.step, -1), MAX_NUMBER),
        later.flags,
        later.incarnation,
        _duration(later.checkpoint_ns),
        # A window is told when both looks have seen the same one.
        min(max(later.num_windows, 0), MAX_NUMBER) if _window(earlier) == _window(later) else 0,
        _duration(later.busy_ns),
        _duration(later.step_ns),
    )


def _window(stamps: WorkerStamps) -> tuple[int, int, int, int]:
    return stamps.iteration, stamps.num_windows, stamps.busy_ns, stamps.step_ns


def _duration(nanoseconds: int) -> int:
    return min(max(nanoseconds, 0), int(MAX_SECONDS) * 10**9)


def read_stack(folder: Path, local_rank: int) -> tuple[str, ...]:
    """Return the frames that a worker wrote last, innermost last; none when there are none."""
    try:
        descriptor = os.open(stack_path(folder, local_rank), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ()
    try:
        text = os.read(descriptor, MAX_STACK_BYTES).decode(errors="replace")
    except OSError:
        return ()
    finally:
        os.close(descriptor)
    return parse_stack(text)
