"""Options in `--rdzv-endpoint`, `--rdzv-conf` and the environment. Pure, but for the token and its files."""

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from unbroken.folders import kept_secret
from unbroken.network.token import read_token
from unbroken.standalone.messages import make_key
from unbroken_core.conventions.tokens import checked_secret, read_shared_secret
from unbroken_core.torchrun_rounds.messages import Limits
from unbroken_core.vocabulary.errors import InputError

logger = logging.getLogger(__name__)

DEFAULT_PORT = 29400
"""The default of torch's own backend."""
_SECONDS = {
    "join_timeout": 600,
    "last_call_timeout": 30,
    "close_timeout": 30,
    "heartbeat_timeout": 15,
    "reconnect_timeout": 2,
    "stop_timeout": 40,
    "start_timeout": 60,
    "read_timeout": 60,
}
_TEXTS = ("token_file", "ca", "server_name", "certificate", "key", "log_file", "domains", "name", "on_failure", "start")
_OF_OTHERS = ("is_host", "store_type", "use_libuv", "timeout", "rank")
"""Options of torch's backends, accepted so that users who try ours need not remove them."""


@dataclass(frozen=True)
class RendezvousOptions:
    """All options. Times in seconds."""

    host: str
    port: int
    limits: Limits
    join_s: float
    """How long a node waits for a round."""
    close_s: float
    """How long it waits until it may leave, or the run is closed."""
    read_s: float
    """How long an answer of the store may take."""
    token: Callable[[], str]
    """Returns the present token; raises InputError."""
    token_file: str
    is_guessable: bool
    """Whether the token follows from the run's name alone."""
    authority_file: str
    """"": plain http."""
    server_name: str
    certificate: str
    key: str
    log_file: str
    domains: tuple[str, ...]
    name: str
    """"": the host's name."""
    is_closed_by_failure: bool
    """Whether a node that has failed ends the run for all."""
    may_start: bool
    """Whether this node starts the rendezvous if nothing listens and the endpoint is this host."""


def read_options(
    endpoint: str, run_id: str, nodes: tuple[int, int], config: Mapping[str, object], environment: Mapping[str, str]
) -> RendezvousOptions:
    """Raises InputError, which is a ValueError, naming the option."""
    texts = {name: str(config.get(name, "")) for name in _TEXTS}
    for name in config:
        if name in _OF_OTHERS:
            logger.info("rdzv-conf: %s has no effect with this backend", name)
        elif name not in _SECONDS and name not in texts:
            raise InputError(f"rdzv-conf: want {', '.join(sorted((*_SECONDS, *_TEXTS)))}, got {name!r}")
    seconds = {name: _seconds(name, config.get(name, default)) for name, default in _SECONDS.items()}
    if not run_id:
        raise InputError("rdzv-id: want a name for the run, got nothing")
    host, port, is_encrypted = _split(endpoint)
    texts["ca"] = texts["ca"] or environment.get("UNBROKEN_RENDEZVOUS_CA", "")
    if is_encrypted and not texts["ca"]:
        raise InputError("rdzv-conf: want ca=FILE, the certificate authority of a rendezvous at https://, got nothing")
    if bool(texts["certificate"]) is not bool(texts["key"]):
        raise InputError("rdzv-conf: want certificate=FILE and key=FILE, or none of them, got one")
    token_file = texts["token_file"] or environment.get("UNBROKEN_TOKEN_FILE", "")
    token, is_guessable = _token(token_file, run_id, host, environment)
    domains = texts["domains"] or environment.get("UNBROKEN_DOMAINS", "")
    return RendezvousOptions(
        host=host,
        port=port,
        limits=Limits(
            min_nodes=nodes[0],
            max_nodes=nodes[1],
            last_call_s=seconds["last_call_timeout"],
            heartbeat_s=seconds["heartbeat_timeout"],
            reconnect_s=seconds["reconnect_timeout"],
            leave_s=seconds["stop_timeout"],
            start_s=seconds["start_timeout"],
        ),
        join_s=seconds["join_timeout"],
        close_s=seconds["close_timeout"],
        read_s=seconds["read_timeout"],
        token=token,
        token_file=str(Path(token_file).absolute()) if token_file else "",
        is_guessable=is_guessable,
        authority_file=texts["ca"],
        server_name=texts["server_name"],
        certificate=_absolute(texts["certificate"]),
        key=_absolute(texts["key"]),
        log_file=_absolute(texts["log_file"]),
        domains=tuple(domains.split("/")) if domains else (),
        name=texts["name"],
        is_closed_by_failure=_word("on_failure", texts["on_failure"], ("continue", "close")) == "close",
        may_start=_word("start", texts["start"], ("auto", "never")) == "auto",
    )


def _token(token_file: str, run_id: str, host: str, environment: Mapping[str, str]) -> tuple[Callable[[], str], bool]:
    """Return what returns the token, and whether anyone can work the token out who knows the run's name."""
    if token_file:
        path = Path(token_file)
        read_token(path)
        return functools.partial(read_token, path), False
    given = environment.get("UNBROKEN_TOKEN", "")
    if given:
        token = checked_secret(given, "UNBROKEN_TOKEN")
        return lambda: token, False
    secret = read_shared_secret(environment)
    if not secret and is_loopback(host):
        # All nodes are on this host: a random secret of this user's reaches them all.
        try:
            secret = kept_secret(make_key("rounds", run_id)[:16])
        except InputError as error:
            logger.info("no secret of this user's own: %s", error)
    # The same on all nodes, without a word between them.
    known = make_key("rounds", run_id, secret)
    return lambda: known, not secret


def is_loopback(host: str) -> bool:
    """Return whether an endpoint is reached from this host only."""
    return host.startswith("127.") or host in ("localhost", "::1")


def _split(endpoint: str) -> tuple[str, int, bool]:
    """Return host, port, and whether to use TLS. Raises InputError."""
    scheme, separator, rest = endpoint.strip().rpartition("://")
    if scheme not in ("", "http", "https") or (separator and not scheme):
        raise InputError(f"rdzv-endpoint: want HOST:PORT or https://HOST:PORT, got {endpoint!r}")
    rest = rest.rstrip("/") or "localhost"
    host, colon, port = rest.rpartition(":")
    if not colon or (":" in host and not host.startswith("[")):
        host, port = rest, str(DEFAULT_PORT)
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise InputError(f"rdzv-endpoint: want a port from 1 to 65535, as all nodes must know it, got {endpoint!r}")
    return host.strip("[]"), int(port), scheme == "https"


def _seconds(name: str, value: object) -> float:
    try:
        seconds = int(str(value))
    except ValueError:
        seconds = 0
    if seconds <= 0:
        raise InputError(f"rdzv-conf: {name}: want whole seconds above 0, got {value!r}")
    return float(seconds)


def _word(name: str, text: str, words: tuple[str, str]) -> str:
    if text and text not in words:
        raise InputError(f"rdzv-conf: {name}: want {' or '.join(words)}, got {text!r}")
    return text or words[0]


def _absolute(path: str) -> str:
    return str(Path(path).absolute()) if path else ""
