"""The processes of one preflight on this host: the leader's, where it is here, and one for each host or pod."""

import functools
import time
from dataclasses import replace
from typing import Any

from unbroken.preflight.forked import EndedError, Forked, Tell
from unbroken.preflight.leader import lead
from unbroken.preflight.meeting import MeetingError, MeetingPlace, uses_store_of_torchrun
from unbroken.preflight.member import TakenError, take_part
from unbroken.preflight.options import Options
from unbroken_core.vocabulary.errors import InputError


def fly(options: Options) -> dict[str, Any]:
    """Return the report as `report`, or why there is none as `error`. Raises InputError."""
    until_s = time.monotonic() + options.total_s
    place = MeetingPlace(*options.leader, options.attempt)
    children: list[Forked] = []
    try:
        if options.rank in (None, 0):
            children.append(Forked(functools.partial(_lead, options, place)))
            place = replace(place, port=int(_said(children[0], until_s)["port"]))
        ranks = range(options.num_hosts) if options.rank is None else [options.rank]
        for rank in ranks:
            name = f"pod-{rank}" if options.rank is None and options.num_hosts > 1 else options.name
            children.append(Forked(functools.partial(_take_part, options, place, rank, name)))
        # The leader, or this host: both tell the same report.
        report = _said(children[0], until_s)
        for child in children[1:]:
            _let_go(child)
        return report
    except MeetingError as error:
        return {"error": str(error)}
    finally:
        for child in children:
            child.end()


def _said(child: Forked, until_s: float) -> dict[str, Any]:
    """Return what a child says. Raises MeetingError and InputError for what it failed with."""
    try:
        value = child.read(until_s)
    except TimeoutError as error:
        raise MeetingError("no report in time") from error
    except EndedError as error:
        raise MeetingError(f"a process of the preflight {error}") from error
    if "input" in value:
        raise InputError(str(value["input"]))
    if "error" in value:
        raise MeetingError(str(value["error"]))
    return dict(value)


def _let_go(child: Forked) -> None:
    """Wait a moment for a host that has been told the report."""
    try:
        child.read(time.monotonic() + 1.0)
    except (TimeoutError, EndedError):
        return


def _lead(options: Options, place: MeetingPlace, tell: Tell) -> None:
    try:
        if uses_store_of_torchrun() and options.rank is not None:
            store, port = place.store(options.arrival_s), place.port
        else:
            store, port = place.serve(options.arrival_s)
        tell({"port": port})
        tell({"report": lead(options, store)})
    except MeetingError as error:
        tell({"error": str(error)})


def _take_part(options: Options, place: MeetingPlace, rank: int, name: str, tell: Tell) -> None:
    try:
        tell({"report": take_part(options, place, rank, name)})
    except TakenError as error:
        tell({"input": f"--host-rank: {error}"})
    except MeetingError as error:
        tell({"error": str(error)})
