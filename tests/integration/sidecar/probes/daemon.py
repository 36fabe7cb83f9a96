"""Starts a health daemon of a node, and says what it answers."""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.waiting import wait_until

SERVER = Path(__file__).with_name("daemon_server.py")


class Daemon:
    """A health daemon as a process of its own."""

    def __init__(self) -> None:
        # Not below pytest's own folder: the path of a Unix socket must be short. A URI cannot have this name as it is.
        self.folder = Path(tempfile.mkdtemp(prefix="ubt-", dir="/tmp"))
        self.socket = self.folder / "of node %41?#.sock"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, **answer: object) -> str:
        """Serve, and return the path of the socket."""
        self.answer(**answer)
        self._process = subprocess.Popen([sys.executable, str(SERVER), str(self.socket), str(self.folder)])
        wait_until((self.folder / "ready").exists, "a daemon that listens")
        return str(self.socket)

    def answer(self, **answer: object) -> None:
        """Answer so from now on."""
        fresh = self.folder / "answer.new"
        fresh.write_text(json.dumps(answer))
        fresh.rename(self.folder / "answer")

    @property
    def requests(self) -> list[bytes]:
        """All that it was asked."""
        return [bytes.fromhex(line) for line in (self.folder / "requests").read_text().splitlines()]

    def kill(self) -> None:
        """End it, and leave its socket as it is."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """End it, and leave nothing."""
        self.kill()
        shutil.rmtree(self.folder)


def response(success: bool, exit_code: int = 0, output: str | bytes = b"") -> str:
    """Return a response in hex; the exit code is one of 0 to 127."""
    data = output.encode() if isinstance(output, str) else output
    # A length in four groups of seven bits, as any below 2^28 may be written.
    groups = [len(data) >> 7 * index & 0x7F for index in range(4)]
    length = bytes([*(group | 0x80 for group in groups[:3]), groups[3]])
    return (bytes([8, success, 16, exit_code, 26]) + length + data).hex()
