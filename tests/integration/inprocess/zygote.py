"""A parent of workers that has imported torch once: forks one worker a request, tells how each ended.

Lines on standard input: {"id": 1, "function": "name", "environment": {...}}. Lines on standard output: {"id": 1,
"pid": 7} and later {"id": 1, "exit_code": 0} (-N when signal N ended it). Ends, with its workers, at end of input.
"""

import importlib.util
import json
import os
import select
import signal
import sys
import traceback
from pathlib import Path
from typing import Any


def main(workloads: Path) -> None:
    """Serve until standard input ends."""
    spec = importlib.util.spec_from_file_location("workloads", workloads)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{workloads}: want a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules["workloads"] = module
    spec.loader.exec_module(module)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    os.set_blocking(reader, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    number_by_pid: dict[int, int] = {}
    buffer = b""
    say({"id": 0, "pid": os.getpid()})
    while True:
        ready, _, _ = select.select([0, reader], [], [])
        if reader in ready:
            os.read(reader, 1 << 16)
            reap(number_by_pid)
        if 0 in ready:
            data = os.read(0, 1 << 16)
            if not data:
                break
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                spawn(module, json.loads(line), number_by_pid, (reader, writer))
    for pid in number_by_pid:
        os.kill(pid, signal.SIGKILL)


def say(message: dict[str, object]) -> None:
    """Write one line."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def reap(number_by_pid: dict[int, int]) -> None:
    """Tell of every child that has ended."""
    while number_by_pid:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        say({"id": number_by_pid.pop(pid), "exit_code": os.waitstatus_to_exitcode(status)})


def spawn(module: object, request: dict[str, Any], number_by_pid: dict[int, int], pipe: tuple[int, int]) -> None:
    """Fork a worker, which never returns from here."""
    pid = os.fork()
    if pid:
        number_by_pid[pid] = int(str(request["id"]))
        say({"id": request["id"], "pid": pid})
        return
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(2, 1)
        for descriptor in (*pipe, null):
            os.close(descriptor)
        os.environ.update(request["environment"])
        getattr(module, str(request["function"]))()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
