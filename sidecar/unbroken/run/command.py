"""The command: reads options, runs the job in a private folder, returns the exit code."""

import asyncio
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from unbroken.run.flags import in_flags
from unbroken.run.loopback_block import LoopbackBlock
from unbroken.run.memory_folder import memory_folder
from unbroken.run.options import STDIN, RunOptions, read_options
from unbroken.run.supervisor import ENDING_SIGNALS, Supervisor
from unbroken_core.conventions.printable import printable
from unbroken_core.protocol.messages import JobStatus
from unbroken_core.vocabulary.errors import InputError

_MAX_FOLDER_CHARACTERS = 70
_MAX_SCRIPT_BYTES = 1 << 20


def run(arguments: Sequence[str] | None) -> int:
    """Run the command line; return 0 complete, 1 failed, 2 bad input, 128 + N after signal N."""
    try:
        return run_job(read_options(arguments)).code
    except InputError as error:
        print(printable(f"unbroken run: {in_flags(str(error))}"), file=sys.stderr)
        return 2


@dataclass(frozen=True)
class EndedRun:
    """How one run ended."""

    code: int
    """As of the command."""
    status: JobStatus | None
    """The last one that was read."""
    signal: int | None = None
    """Which one asked this command to end, also where the job was over already."""


def run_job(options: RunOptions) -> EndedRun:
    """Run one job to its end. Raises InputError."""
    block = LoopbackBlock()
    # Readable by this user only: it holds the token and the sockets.
    folder = Path(tempfile.mkdtemp(prefix="unbroken-", dir=_short_folder()))
    try:
        if options.command[1:2] == (STDIN,):
            script = _script_from_stdin(folder)
            options = replace(options, command=(options.command[0], str(script), *options.command[2:]))
        with memory_folder("--memory", options.memory_bytes is not None) as memory:
            return asyncio.run(_supervise(options, folder, block, memory))
    finally:
        block.release()
        shutil.rmtree(folder, ignore_errors=True)


def _script_from_stdin(folder: Path) -> Path:
    """Return a file with what stands on standard input: every worker reads it, and each again when it restarts."""
    text = sys.stdin.buffer.read(_MAX_SCRIPT_BYTES + 1)
    if not text.strip() or len(text) > _MAX_SCRIPT_BYTES:
        seen = f"more than {_MAX_SCRIPT_BYTES} bytes" if text.strip() else "nothing"
        raise InputError(f"script on standard input: want at most {_MAX_SCRIPT_BYTES} bytes of Python, got {seen}")
    path = folder / "stdin.py"
    path.write_bytes(text)
    return path


def _short_folder() -> str:
    """Return the user's folder for temporary files, or /tmp when its path is too long for sockets below it."""
    chosen = tempfile.gettempdir()
    return chosen if len(chosen) <= _MAX_FOLDER_CHARACTERS else "/tmp"


async def _supervise(options: RunOptions, folder: Path, block: LoopbackBlock, memory: Path | None) -> EndedRun:
    supervisor = Supervisor(options, folder, block, memory)
    loop, before = asyncio.get_running_loop(), {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    try:
        code = await supervisor.run()
    finally:
        # The loop would leave those of the system at its end.
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
    return EndedRun(code, supervisor.status, supervisor.signal)
