"""A worker without torch: says who it is, and runs until it is told how to end. `torchrun_worker.py FOLDER`.

It ends with 0 when FOLDER/finish is there, and with 3 when FOLDER/fail-<node> is, which it takes away.
"""

import contextlib
import json
import os
import socket
import sys
import time
from pathlib import Path

_POLL_S = 0.02
"""Between two looks at the folder. tests/waiting.py belongs to pytest, which is not to be in a worker."""
_LIMIT_S = 600.0
"""Longer than any test; for workers that a killed test leaves behind."""


def main() -> int:
    """Return the exit code."""
    folder, node = Path(sys.argv[1]), os.environ["TEST_NODE"]
    # The store of the round must be there for workers as well.
    socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), 10).close()
    names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT")
    event = {"node": node, "pid": os.getpid(), **{name.lower(): int(os.environ[name]) for name in names}}
    with (folder / "events").open("a") as file:
        file.write(json.dumps(event) + "\n")
    print(f"rank {os.environ['RANK']} of {node}", flush=True)
    until_s = time.monotonic() + _LIMIT_S
    while not (folder / "finish").exists():
        if time.monotonic() > until_s:
            raise TimeoutError(f"{folder / 'finish'}: want this file within {_LIMIT_S:g} s, got none")
        with contextlib.suppress(FileNotFoundError):
            (folder / f"fail-{node}").unlink()
            return 3
        time.sleep(_POLL_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
