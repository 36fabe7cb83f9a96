"""The command: reads options, runs the job in a private folder, returns the exit code."""

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from unbroken.run.flags import in_flags
from unbroken.run.loopback_block import LoopbackBlock
from unbroken.run.memory_folder import memory_folder
from unbroken.run.options import RunOptions, read_options
from unbroken.run.supervisor import Supervisor
from unbroken_core.conventions.printable import printable
from unbroken_core.errors import InputError

_MAX_FOLDER_CHARACTERS = 70


def run(arguments: Sequence[str] | None) -> int:
    """Run the command line; return 0 complete, 1 failed, 2 bad input, 128 + N after signal N."""
    try:
        options = read_options(arguments)
        block = LoopbackBlock()
    except InputError as error:
        print(printable(f"unbroken run: {in_flags(str(error))}"), file=sys.stderr)
        return 2
    # Readable by this user only: it holds the token and the sockets.
    folder = Path(tempfile.mkdtemp(prefix="unbroken-", dir=_short_folder()))
    try:
        with memory_folder("--memory", options.memory_bytes is not None) as memory:
            return asyncio.run(_supervise(options, folder, block, memory))
    except InputError as error:
        print(f"unbroken run: {error}", file=sys.stderr)
        return 2
    finally:
        block.release()
        shutil.rmtree(folder, ignore_errors=True)


def _short_folder() -> str:
    """Return the user's folder for temporary files, or /tmp when its path is too long for sockets below it."""
    chosen = tempfile.gettempdir()
    return chosen if len(chosen) <= _MAX_FOLDER_CHARACTERS else "/tmp"


async def _supervise(options: RunOptions, folder: Path, block: LoopbackBlock, memory: Path | None) -> int:
    return await Supervisor(options, folder, block, memory).run()
