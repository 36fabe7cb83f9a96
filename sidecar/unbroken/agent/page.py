"""The page of stamps that the pod's workers write and the agent reads."""

import mmap
import os
from pathlib import Path

from unbroken.agent.access import shared_mode
from unbroken_core.errors import InputError
from unbroken_core.stamps import Slot, pack_header, page_bytes, unpack_slot


class StampPage:
    """A mapped page. One that is there already is kept: running workers have it mapped."""

    def __init__(self, path: Path, num_slots: int) -> None:
        """Open or create the page. Raises InputError when a file of another layout is in the way."""
        self._num_slots = num_slots
        size = page_bytes(num_slots)
        if not path.exists():
            # Complete under another name first: a worker must never map a page that is too short.
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
