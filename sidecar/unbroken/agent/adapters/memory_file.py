"""What an agent must still know after a restart, in two files of the pod's folder that are written in turn.

Each holds a line with checksum, serial number and length, and the memory as JSON. One of the two is whole at any
moment, and a write costs one system call: no worker waits long for its rank.
"""

import logging
import os
import zlib
from pathlib import Path

from unbroken.agent.decisions.events import AgentMemory
from unbroken_core.protocol import wire
from unbroken_core.vocabulary.errors import WireError

logger = logging.getLogger(__name__)

_MAX_HEAD_BYTES = 100
_NAMES = ("agent-0.memory", "agent-1.memory")


class MemoryFile:
    """Read once at the start, then written at each change. Errors are only logged: training goes on."""

    def __init__(self, folder: Path) -> None:
        """Open both files, made with mode 0600 where they are missing."""
        self._descriptors: list[int] = []
        self._serial = 0
        try:
            for name in _NAMES:
                self._descriptors.append(os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            logger.warning("memory not kept: folder=%s error=%s", folder, error)
            self.close()

    def read(self) -> AgentMemory:
        """Return the newest memory that is whole; an empty one when there is none."""
        found = [_parse(_content(descriptor)) for descriptor in self._descriptors]
        whole = [pair for pair in found if pair is not None]
        self._serial, memory = max(whole, key=lambda pair: pair[0], default=(0, AgentMemory()))
        return memory

    def write(self, memory: AgentMemory) -> None:
        """Replace the older of the two."""
        if not self._descriptors:
            return
        self._serial += 1
        try:
            os.pwrite(self._descriptors[self._serial % 2], _format(memory, self._serial), 0)
        except OSError as error:
            logger.warning("memory not written: error=%s", error)

    def close(self) -> None:
        """Close both files; harmless when repeated."""
        while self._descriptors:
            os.close(self._descriptors.pop())


def read_memory(folder: Path) -> AgentMemory:
    """Return what the agent of this folder would remember if it were started now."""
    file = MemoryFile(folder)
    try:
        return file.read()
    finally:
        file.close()


def _format(memory: AgentMemory, serial: int) -> bytes:
    text = wire.encode(memory).encode()
    return f"{_checksum(serial, text):08x} {serial} {len(text)}\n".encode() + text + b"\n"


def _parse(content: bytes) -> tuple[int, AgentMemory] | None:
    """Return serial number and memory; None when the file is empty or was not written to its end."""
    head, _, rest = content.partition(b"\n")
    words = head.decode(errors="replace").split()
    # Python refuses to read numbers of thousands of digits.
    if len(words) != 3 or len(head) > _MAX_HEAD_BYTES or not (words[1].isdecimal() and words[2].isdecimal()):
        return None
    serial, text = int(words[1]), rest[: int(words[2])]
    if words[0] != f"{_checksum(serial, text):08x}":
        return None
    try:
        memory: AgentMemory = wire.decode(text, AgentMemory)
    except WireError as error:
        logger.warning("memory of the previous agent is not usable: error=%s", error)
        return None
    return serial, memory


def _checksum(serial: int, text: bytes) -> int:
    return zlib.crc32(text, serial)


def _content(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
