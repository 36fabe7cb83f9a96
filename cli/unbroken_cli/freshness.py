"""Pure: whether an operator still keeps the status of its jobs up to date, by the Lease that it renews."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

from unbroken_cli.job import moment

MIN_SILENCE_S = 12.0
"""Clocks of a cluster differ by less. With the chart's Lease of 8 s, no statement is taken for true for over 15 s."""
DURATIONS = 1.5
"""Another operator takes over after one duration of the Lease, and looks a few times in each."""


def why_stale(lease: str, item: Mapping[str, Any] | None, server_date: str) -> str:
    """Return why nobody writes the status of the jobs of this Lease; "" when somebody does, or it cannot be known.

    `item` is None when there is no such Lease. `server_date`: the Date header of the answer, the API server's clock, as
    this machine's may be wrong.
    """
    if item is None:
        return f"no operator keeps this up to date: its Lease {lease} is gone"
    spec = item.get("spec") or {}
    renewed, now = moment(str(spec.get("renewTime") or "")), _http_date(server_date)
    if not spec.get("holderIdentity"):
        since = f" since {renewed:%Y-%m-%d %H:%M:%S} UTC" if renewed is not None else ""
        return f"no operator keeps this up to date: nobody holds its Lease {lease}{since}"
    if renewed is None or now is None:
        return ""
    try:
        duration_s = float(spec.get("leaseDurationSeconds") or 0)
    except (TypeError, ValueError):
        duration_s = 0.0
    silence = now - renewed
    if silence <= timedelta(seconds=max(MIN_SILENCE_S, min(DURATIONS * duration_s, 7200.0))):
        return ""
    return (
        f"no operator keeps this up to date: its Lease {lease} was renewed last at {renewed:%Y-%m-%d %H:%M:%S} UTC, "
        f"{int(silence.total_seconds())} s ago"
    )


def _http_date(text: str) -> datetime | None:
    try:
        found = parsedate_to_datetime(text)
    except (TypeError, ValueError):
        return None
    return found if found.tzinfo is not None else None
