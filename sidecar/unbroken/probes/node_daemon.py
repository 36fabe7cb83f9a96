"""`python -m unbroken.probes.node_daemon`: asks the node's own health daemon, over gRPC on a Unix socket.

    exit code 0    its check passed
    exit code 1    its check failed
    exit code 2    nothing is known: wrong options, no grpcio, no daemon, no answer in time, an answer that is none

One line on standard output says more. The daemon is NVIDIA's `nvhcd` or one with its contract (`daemon_answer`), which
their resiliency extension asks with `--ft-node-health-check-endpoint`. Without a daemon the extension calls a node
healthy; here that is unknown.
"""

import argparse
import os
import socket
import stat
import sys
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from unbroken.probes.daemon_answer import (
    MAX_ANSWER_BYTES,
    METHOD,
    decode_answer,
    encode_request,
    judge_answer,
    line_of,
)
from unbroken.watch.errors import NotCheckedError
from unbroken_core.vocabulary.errors import InputError

HEALTHY, FAILED, UNKNOWN = 0, 1, 2
_MAX_PATH_BYTES: Final = 107
"""Of a Unix socket's path, as Linux has it."""
_MAX_TIMEOUT_S: Final = 60.0
_CONNECT_S: Final = 0.5


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask, print one line, and return the exit code."""
    try:
        code, line = _ask(_parse(arguments))
    except (InputError, NotCheckedError) as error:
        code, line = UNKNOWN, str(error)
    except Exception as error:  # Python would end with 1, which says that the node is broken.
        code, line = UNKNOWN, f"the daemon could not be asked: {error!r}"
    try:
        # As bytes, and by no object of Python's: a locale may have no name for what the daemon says.
        os.write(1, line_of(line).encode() + b"\n")
    except OSError as error:
        print(f"{line_of(line)}: cannot be said: {error}", file=sys.stderr)
        return UNKNOWN
    return code


def read_endpoint(text: str) -> str:
    """Return the path of a Unix socket. Raises InputError."""
    path = text.removeprefix("unix:").removeprefix("//") if text.startswith("unix:") else text
    if not path.startswith("/") or "\0" in path or len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise InputError(
            f"--endpoint: want the absolute path of a Unix socket, or unix:// before it, in at most {_MAX_PATH_BYTES} "
            f"bytes, got {text[:60]!r}"
        )
    return path


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="unbroken.probes.node_daemon", description="Ask the node's health daemon.", allow_abbrev=False
    )
    parser.add_argument("--endpoint", required=True, metavar="SOCKET", help="/path or unix:///path")
    parser.add_argument(
        "--timeout", type=float, default=3.0, metavar="S", help="for connection and answer, below the probe's own (3)"
    )
    parser.add_argument("args", nargs="*", metavar="ARG", help="arguments of the daemon's check, after --")
    parsed = parser.parse_args(arguments)
    if not 0.1 <= parsed.timeout <= _MAX_TIMEOUT_S:
        raise InputError(f"--timeout: want 0.1 to {_MAX_TIMEOUT_S:g} seconds, got {parsed.timeout:g}")
    return parsed


def _ask(options: argparse.Namespace) -> tuple[int, str]:
    path, request = read_endpoint(options.endpoint), encode_request(options.args)
    _require_socket(path)
    try:
        import grpc  # noqa: PLC0415 - the image need not have it
    except ImportError as error:
        raise NotCheckedError(f"gRPC cannot be imported (pip install grpcio): {error}") from error
    verdict = judge_answer(decode_answer(_call(grpc, path, request, options.timeout)))
    return HEALTHY if verdict.is_healthy else FAILED, verdict.message


def _require_socket(path: str) -> None:
    try:
        mode = Path(path).stat().st_mode
    except OSError as error:
        raise NotCheckedError(f"no daemon: {path}: {error.strerror}: is it mounted into this container?") from error
    if not stat.S_ISSOCK(mode):
        raise NotCheckedError(f"no daemon: {path}: want a Unix socket, got another kind of file")


def _call(grpc: Any, path: str, request: bytes, timeout_s: float) -> bytes:
    options = (
        ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
        # Else some servers refuse what gRPC makes of a path.
        ("grpc.default_authority", "localhost"),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
    )
    with grpc.insecure_channel(f"unix:{urllib.parse.quote(path)}", options) as channel:
        try:
            answer: bytes | None = channel.unary_unary(METHOD)(request, timeout=timeout_s)
        except grpc.RpcError as error:
            code, details = error.code(), error.details() or "no more is said"
            if code is grpc.StatusCode.UNIMPLEMENTED:
                raise NotCheckedError(f"{path} answers, but does not know {METHOD}: {details}") from error
            limit = f" (--timeout {timeout_s:g})" if code is grpc.StatusCode.DEADLINE_EXCEEDED else ""
            # gRPC says last what a line has no room for.
            refusal = _refusal(path) if code is grpc.StatusCode.UNAVAILABLE else ""
            raise NotCheckedError(f"no answer of {path}: {code.name}{limit}: {refusal or details}") from error
    # gRPC's own value for a daemon that ends the call well and says nothing.
    if answer is None:
        raise NotCheckedError(f"no answer of {path}: it ended the call without one")
    return answer


def _refusal(path: str) -> str:
    """Return why nothing can connect to a socket now, "" where something can."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_CONNECT_S)
        try:
            connection.connect(path)
        except OSError as error:
            return error.strerror or str(error)
    return ""


if __name__ == "__main__":
    sys.exit(main())
