"""Does what `kubectl port-forward` does, with the address in STANDIN_TARGET as the pod: prints the port, and relays.

Notes what it was asked in the file STANDIN_ASKED. With STANDIN_ERROR it says that instead and ends, as kubectl does.
"""

import os
import shlex
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def kubectl_standin(folder: Path, **variables: str) -> Iterator[Path]:
    """Put this in the place of kubectl for all that is started within; yields the file with what it was asked."""
    import pytest  # Not where this is the program.

    program = folder / "kubectl"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).absolute()}" "$@"\n')
    program.chmod(0o700)
    asked = folder / "asked"
    with pytest.MonkeyPatch.context() as patch:
        path = f"{folder}:{os.environ['PATH']}"
        for name, value in {"PATH": path, "STANDIN_ASKED": str(asked), **variables}.items():
            patch.setenv(name, value)
        yield asked


def copy(source: socket.socket, target: socket.socket) -> None:
    """Copy until either end is closed."""
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
    except OSError:
        pass
    for one in (source, target):
        try:
            one.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


def main() -> int:
    """Forward until killed; the exit code."""
    with Path(os.environ["STANDIN_ASKED"]).open("a") as file:
        file.write(shlex.join(sys.argv[1:]) + "\n")
    if os.environ.get("STANDIN_ERROR"):
        print(os.environ["STANDIN_ERROR"], file=sys.stderr)
        return 1
    host, _, port = os.environ["STANDIN_TARGET"].rpartition(":")
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(f"Forwarding from 127.0.0.1:{server.getsockname()[1]} -> {port}", flush=True)
        while True:
            near, _ = server.accept()
            print(f"Handling connection for {port}", flush=True)
            far = socket.create_connection((host, int(port)))
            for pair in ((near, far), (far, near)):
                threading.Thread(target=copy, args=pair, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
