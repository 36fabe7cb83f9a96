"""`python -m unbroken.agent`: the process of a pod's sidecar."""

import asyncio
import os
import signal
import sys

from unbroken.agent.config import read_config
from unbroken.agent.shell import Agent
from unbroken.logs import read_level, start_log
from unbroken_core.conventions.printable import printable
from unbroken_core.vocabulary.errors import InputError


async def _run() -> int:
    config = read_config()
    for folder in (config.directory, config.private_directory):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    code = await Agent(config).run()
    _ignore_signals(asyncio.get_running_loop())
    return code


def _ignore_signals(loop: asyncio.AbstractEventLoop) -> None:
    """Ignore termination signals from now on: all is done, and the exit code is known.

    The kubelet sends SIGTERM as soon as the trainer's container has ended, which is just when the agent of a complete
    job ends by itself. A signal between the end of the loop and that of the process would make its exit code 143.
    """
    numbers = (signal.SIGTERM, signal.SIGINT)
    # Until both are ignored the loop's handler is gone and the default one, which ends the process, would be in force.
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    for number in numbers:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def main() -> int:
    """Run the agent; return 0 after the job's end, 2 for bad input."""
    try:
        start_log("unbroken.agent", read_level(os.environ), with_time=False, pod=os.environ.get("UNBROKEN_POD", ""))
        return asyncio.run(_run())
    except InputError as error:
        print(printable(f"unbroken.agent: {error}"), file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
