"""A check that is built in has a name that no probe may have, and a row on the page of health."""

import re
from pathlib import Path

from unbroken.watch.checks.gpu import EVENTS
from unbroken.watch.checks.probe import BUILT_IN
from unbroken.watch.config import WatchConfig
from unbroken.watch.watch import Board, make_lanes

ROOT = Path(__file__).parents[4]


def names() -> set[str]:
    """Return the names of all built-in checks that read something."""
    lanes = make_lanes(WatchConfig(Path("/folder"), Path("/nowhere"), "", (), ()), Board(lambda: None))
    return {EVENTS, *(check.name for lane in lanes for check in lane.checks)}


def test_no_probe_may_have_the_name_of_a_built_in_check() -> None:
    assert names() - BUILT_IN == set()


def test_the_page_of_health_has_a_row_for_each_built_in_check() -> None:
    page = (ROOT / "docs" / "health.md").read_text(encoding="utf-8")
    section = page.partition("\n## Checks\n")[2].partition("\n## ")[0]
    assert names() - set(re.findall(r"^\| `([\w-]+)` \|", section, re.MULTILINE)) == set()
