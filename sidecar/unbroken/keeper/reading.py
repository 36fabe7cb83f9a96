"""Reads a sealed slot while nobody may overwrite it.

The lock is flock's: it ends with the process that has it. Who writes a slot asks for the exclusive one, and does not
wait for it: a worker skips that save.
"""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from unbroken.keeper.digests import open_slot, read_slot_head
from unbroken_core.pod.memory_slots import BLOCK_BYTES, CONTENT_OFFSET, HEAD_BYTES, Head, pack_head

CHUNK_BYTES = 1 << 20


class SlotBusyError(Exception):
    """The slot is being written, or holds something else by now."""


class ReadLock:
    """A slot that stays as it is. Read with `pread`: the trainer may truncate the file, and a mapping would end us."""

    def __init__(self, path: Path, head: Head) -> None:
        self._path = path
        self._head = head
        self._descriptor = -1
        self._buffer = bytearray(CHUNK_BYTES)

    def __enter__(self) -> "ReadLock":
        """Lock it. Raises SlotBusyError, OSError."""
        self._descriptor = open_slot(self._path, os.O_RDONLY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if read_slot_head(self._path) != self._head:
                raise SlotBusyError(f"{self._path.name} holds another checkpoint by now")
        except BlockingIOError:
            self.__exit__(None, None, None)
            raise SlotBusyError(f"{self._path.name} is being written") from None
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    @property
    def packed_head(self) -> bytes:
        """What identifies the content, for a message."""
        return pack_head(self._head)[:HEAD_BYTES].rstrip(b"\0")

    def chunks(self, block: int) -> Iterator[memoryview]:
        """Yield the bytes of one block, each part in the same buffer. Raises OSError when the file ends before."""
        start = block * BLOCK_BYTES
        end = min(start + BLOCK_BYTES, self._head.content_bytes)
        while start < end:
            with memoryview(self._buffer) as whole, whole[: min(CHUNK_BYTES, end - start)] as part:
                count = os.preadv(self._descriptor, [part], CONTENT_OFFSET + start)
                if count <= 0:
                    raise OSError(f"{self._path.name} has become shorter")
                yield part[:count]
                start += count
