"""`python -m unbroken.standalone host FOLDER LOCK` and `... root FOLDER`: started by wrappers, not by people.

Both return to their starter as soon as they are ready, and go on detached.
"""

import asyncio
import logging
import os
import secrets
import shutil
import sys
from pathlib import Path

from unbroken.daemon import leave_starter
from unbroken.folders import lock_folder, sweep
from unbroken.logs import read_level, start_log
from unbroken.network.addresses import listen_at
from unbroken.standalone.host import MEMORY, Host
from unbroken.standalone.messages import ASSIGNMENT_NAME, CONFIG_NAME, PodAssignment, StandaloneConfig
from unbroken.standalone.root import Root, bind
from unbroken_core.conventions.printable import printable_lines
from unbroken_core.protocol import wire
from unbroken_core.vocabulary.errors import UnbrokenError

logger = logging.getLogger(__name__)


def _host(folder: Path, config: StandaloneConfig, level: str) -> int:
    leave_starter(config.log_file or str(folder / "host.log"))
    start_log("unbroken.standalone", level, with_time=True)

    async def run() -> None:
        sweep(folder.parent)
        await Host(folder, config, os.environ.get(MEMORY, "")).run()

    try:
        asyncio.run(run())
    finally:
        # It is still locked, so no other process uses it.
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _root(folder: Path, config: StandaloneConfig, level: str) -> int:
    path = folder / ASSIGNMENT_NAME
    assignment: PodAssignment | None = wire.decode(path.read_bytes(), PodAssignment) if path.exists() else None
    rendezvous = None if assignment is None else listen_at("MASTER_ADDR", config.master_host, assignment.port)
    listener = bind(config.master_host, config.ports)
    # Locked for as long as this process lives: `sweep` removes folders that are not.
    own = folder.parent / f"root-{secrets.token_hex(8)}"
    while lock_folder(own) is None:
        pass
    print(listener.getsockname()[1], flush=True)
    leave_starter(config.log_file or str(own / "root.log"))
    start_log("unbroken.standalone", level, with_time=True)

    async def run() -> None:
        root = Root(own, config, listener)
        if assignment is not None and rendezvous is not None:
            await root.resume(assignment, rendezvous)
        else:
            await root.run()

    try:
        asyncio.run(run())
    finally:
        shutil.rmtree(own, ignore_errors=True)
    return 0


def main() -> int:
    """Run host or root; return 2 for bad input, with the reason on standard error."""
    try:
        kind, name, *_ = sys.argv[1:]
        folder = Path(name)
        level = read_level(os.environ)
        config: StandaloneConfig = wire.decode((folder / CONFIG_NAME).read_bytes(), StandaloneConfig)
        return {"host": _host, "root": _root}[kind](folder, config, level)
    except (UnbrokenError, OSError) as error:
        print(printable_lines(str(error)), file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
