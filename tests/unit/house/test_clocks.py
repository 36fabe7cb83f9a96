"""Clocks may be wrong on every host: where the wall clock is read at all, and that no decision follows from it."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("core/unbroken_core", "sidecar/unbroken", "operator/unbroken_operator")
WALL = {
    "time": {"time", "time_ns", "localtime", "gmtime", "ctime", "asctime", "strftime", "CLOCK_REALTIME"},
    "datetime": {"now", "utcnow", "today"},
    "date": {"today"},
}
FOR_PEOPLE = {
    "sidecar/unbroken/rendezvous/service.py": {"time.time"},  # instants in the status
    "operator/unbroken_operator/worker.py": {"datetime.now"},  # instants in conditions; the user's deadline
    "operator/unbroken_operator/adapters/poller.py": {"datetime.now"},  # when a rendezvous was last heard
    "operator/unbroken_operator/adapters/lease.py": {"datetime.now"},  # instants in the Lease
    "operator/unbroken_operator/adapters/quarantine_taints.py": {
        "datetime.now"
    },  # since when; it outlives the operator
    "operator/unbroken_operator/drains/looking.py": {"datetime.now"},  # instants in conditions
    "operator/unbroken_operator/adapters/logs.py": {"time.gmtime", "time.strftime"},  # log lines
}


def wall_clock_reads(source: str) -> set[str]:
    """Return the reads of the wall clock in a module, as "module.function"."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            owner = node.value
            name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
            if node.attr in WALL.get(name, ()):
                found.add(f"{name}.{node.attr}")
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            found |= {f"time.{alias.name}" for alias in node.names if alias.name in WALL["time"]}
    return found


@pytest.mark.parametrize(
    ("source", "reads"),
    [
        ("import time\ntime.time()", {"time.time"}),
        ("from time import time_ns", {"time.time_ns"}),
        ("import datetime\ndatetime.datetime.now()", {"datetime.now"}),
        ("import time\ntime.clock_gettime(time.CLOCK_REALTIME)", {"time.CLOCK_REALTIME"}),
        ("import time\ntime.monotonic()\nloop.time()", set()),
    ],
)
def test_every_way_to_read_the_wall_clock_is_found(source: str, reads: set[str]) -> None:
    assert wall_clock_reads(source) == reads


def test_the_wall_clock_is_read_for_people_only() -> None:
    """3.41, 2.28, 4.25: durations and deadlines are monotonic, and no host compares its clock with another's."""
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert paths
    found = {str(path.relative_to(ROOT)): reads for path in paths if (reads := wall_clock_reads(path.read_text()))}
    assert found == FOR_PEOPLE


def test_no_message_between_hosts_carries_an_instant_to_decide_by() -> None:
    """What agents tell are states, numbers and durations; instants are in the status, which only people read."""
    source = (ROOT / "core/unbroken_core/protocol/messages.py").read_text()
    instants = {
        (cls.name, field.target.id)
        for cls in ast.parse(source).body
        if isinstance(cls, ast.ClassDef)
        for field in cls.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if field.target.id.endswith(("_at", "_at_s", "_time", "_ns"))
    }
    assert instants == {("Recovery", "started_at"), ("Recovery", "ended_at")}
