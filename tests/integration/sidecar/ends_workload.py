"""A script that goes on after its training function: how, is said by rank as JSON in its argument."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from unbroken import inprocess

ENDS: dict[str, str] = json.loads(sys.argv[1])


@inprocess.Wrapper()
def train() -> int:
    """Train for no time at all; return the rank."""
    end(ENDS.get(f"in {os.environ['RANK']}", ""))
    return int(os.environ["RANK"])


def end(how: str) -> None:
    """End as the test wants."""
    if how.startswith("exit "):
        sys.exit(int(how.removeprefix("exit ")))
    if how == "raise":
        raise RuntimeError("no disk")
    if how == "mistake":
        raise NameError("name 'undefined' is not defined")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "again":
        train()
    while how == "wait" and not Path(os.environ["TEST_DONE"]).exists():
        time.sleep(0.01)


if __name__ == "__main__":
    end(ENDS.get(str(train()), ""))
