"""One host of a preflight: checks itself, tests with whom the leader says, and gets the report."""

import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined] # torch does not export them by name

from unbroken.preflight.meeting import MeetingError, MeetingPlace, put, take
from unbroken.preflight.options import GRACE_S, Options
from unbroken.preflight.own_checks import own_checks
from unbroken.preflight.pair_trial import try_pair

_SIOCGIFADDR = 0x8915
_SLACK_S = 30.0
"""For a leader that is busy, beyond what it waits for others."""


class TakenError(Exception):
    """Another process has this rank."""


def take_part(options: Options, place: MeetingPlace, rank: int, name: str) -> dict[str, Any]:
    """Return the leader's report. Raises MeetingError and TakenError."""
    choose_interface(place.host)
    checks = own_checks(options.devices, options.own_s)
    store = place.store(options.arrival_s)
    _sit_down(store, rank)
    put(store, f"arrived/{rank}", {"name": name, "domains": list(options.domains), **checks})
    wait_s = options.arrival_s + _SLACK_S
    number = 1
    while True:
        order = take(store, f"order/{number}", wait_s)
        if "report" in order:
            put(store, f"read/{rank}", {})
            return _report_of(order)
        limit_s, task = _task_of(order, rank)
        if task is not None:
            put(store, f"result/{number}/{rank}", try_pair(place, task, limit_s))
        wait_s = limit_s + GRACE_S + _SLACK_S
        number += 1


def _sit_down(store: Store, rank: int) -> None:
    try:
        seat = store.add(f"seat/{rank}", 1)
    except RuntimeError as error:
        raise MeetingError(f"the leader's store has failed: {error}") from error
    if seat != 1:
        raise TakenError(f"rank {rank}: another process has it")


def _report_of(order: dict[str, Any]) -> dict[str, Any]:
    report = order["report"]
    if not isinstance(report, dict):
        raise MeetingError("the leader's report cannot be read")
    return report


def _task_of(order: dict[str, Any], rank: int) -> tuple[float, dict[str, Any] | None]:
    try:
        return float(order["limit_s"]), order["tasks"].get(str(rank))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MeetingError("the leader's order cannot be read") from error


def choose_interface(leader: str) -> None:
    """Let gloo use the interface that leads to this host: a host's own name often means loopback."""
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    name = _interface_towards(leader, [name for _, name in socket.if_nameindex()])
    if name is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name


def _interface_towards(leader: str, names: Sequence[str]) -> str | None:
    """Return the interface with the address that packets to the leader come from; None with IPv6, or where none is."""
    import fcntl  # noqa: PLC0415 - not everywhere where options are read

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((leader, 9))
        except OSError:
            return None
        own = socket.inet_aton(probe.getsockname()[0])
        for name in names:
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            if answer[20:24] == own:
                return name
    # 127.0.0.2 is an address of lo as well, though not the one that it tells.
    return "lo" if own[0] == 127 else None
