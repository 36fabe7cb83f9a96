"""Files that the pod's workers write and the agent reads: the page of stamps, and stacks."""

import mmap
import os
from pathlib import Path

from unbroken.agent.adapters.access import shared_mode
from unbroken_core.errors import InputError
from unbroken_core.pod.stacks import MAX_STACK_BYTES, parse_stack, stack_path
from unbroken_core.pod.stamps import Slot, pack_header, page_bytes, unpack_slot


class StampPage:
    """A mapped page. An existing file is kept: running workers have it mapped."""

    def __init__(self, path: Path, num_slots: int) -> None:
        """Open or create the page. Raises InputError when a file of another layout is in the way."""
        self._num_slots = num_slots
        size = page_bytes(num_slots)
        if not path.exists():
            # Complete it under another name first: a worker must never map a page that is too short.
            part = path.with_name(f"{path.name}.{os.getpid()}")
            part.write_bytes(pack_header(num_slots).ljust(size, b"\0"))
            part.chmod(shared_mode(path.parent))
            part.replace(path)
        with path.open("r+b") as file:
            seen = file.read(len(pack_header(num_slots)))
            if seen != pack_header(num_slots) or path.stat().st_size != size:
                raise InputError(f"{path}: want a page of {num_slots} slots ({size} bytes), got {path.stat().st_size}")
            self._map = mmap.mmap(file.fileno(), size)

    def read(self) -> tuple[Slot, ...]:
        """Return the stamps of all places in local order."""
        with memoryview(self._map) as view:
            return tuple(unpack_slot(view, rank) for rank in range(self._num_slots))

    def close(self) -> None:
        """Unmap the page; the file stays."""
        self._map.close()


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
