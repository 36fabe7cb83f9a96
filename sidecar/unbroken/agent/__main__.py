"""`python -m unbroken.agent`: the process of a pod's sidecar."""

import asyncio
import logging
import os
import sys

from unbroken.agent.config import read_config
from unbroken.agent.shell import Agent
from unbroken_core.errors import InputError


async def _run() -> int:
    config = read_config()
    config.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return await Agent(config).run()


def main() -> int:
    """Run the agent; return 0 after the job's end, 2 for bad input."""
    level = os.environ.get("UNBROKEN_LOG_LEVEL", "INFO").upper()
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        print(f"unbroken.agent: UNBROKEN_LOG_LEVEL: want DEBUG, INFO, WARNING or ERROR, got {level!r}", file=sys.stderr)
        return 2
    logging.basicConfig(level=level, stream=sys.stderr, format="%(levelname).1s unbroken.agent: %(message)s")
    try:
        return asyncio.run(_run())
    except InputError as error:
        print(f"unbroken.agent: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
