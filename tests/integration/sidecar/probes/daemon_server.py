"""A health daemon of a node, by grpcio's own server: `python daemon_server.py SOCKET FOLDER`.

FOLDER/answer, read at each call, says what it does: {"hex": ...} answers these bytes, {"status": ...} a gRPC status
with {"details": ...}, {"hang": true} never answers, {} ends the call well and says nothing. FOLDER/requests has each
request in hex. FOLDER/ready comes once it listens.
"""

import json
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc


def main(socket: str, folder: Path) -> None:
    """Serve until it is killed."""

    # As one that may send any number of answers, and so none.
    def answer(request: bytes, context: Any) -> Iterator[bytes]:
        with (folder / "requests").open("a") as file:
            file.write(f"{request.hex()}\n")
        wanted = json.loads((folder / "answer").read_text())
        if wanted.get("hang"):
            threading.Event().wait()
        if "status" in wanted:
            context.abort(grpc.StatusCode[wanted["status"]], wanted["details"])
        if "hex" in wanted:
            yield bytes.fromhex(wanted["hex"])

    service = json.loads((folder / "answer").read_text()).get("service", "nvhcd.HealthCheckService")
    handlers = {"RunHealthCheck": grpc.unary_stream_rpc_method_handler(answer)}
    server = grpc.server(
        ThreadPoolExecutor(4),
        handlers=[grpc.method_handlers_generic_handler(service, handlers)],
        options=[("grpc.max_send_message_length", -1)],
    )
    server.add_insecure_port(f"unix:{urllib.parse.quote(socket)}")
    server.start()
    (folder / "ready").touch()
    server.wait_for_termination()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
