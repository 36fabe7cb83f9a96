"""tools/lock.py: what the lock file says, and when it is out of date."""

import pytest
from packaging.requirements import Requirement
from tools import lock


def test_lock_lists_exact_versions_by_name_without_torch_and_the_project() -> None:
    report = {
        "install": [
            {"metadata": {"name": "PyYAML", "version": "6.0.3"}},
            {"metadata": {"name": "torch", "version": "2.13.0+cpu"}},
            {"metadata": {"name": "aiohttp", "version": "3.14.5"}},
            {"metadata": {"name": "unbroken", "version": "0.1.0"}},
        ]
    }
    assert lock.render_lock(report) == lock.HEADER + "aiohttp==3.14.5\npyyaml==6.0.3\n"


def test_lock_reads_back_what_it_wrote() -> None:
    assert lock.parse_lock(lock.HEADER + "a-b==1\nc==2.0\n") == {"a-b": "1", "c": "2.0"}


@pytest.mark.parametrize(
    ("pinned", "wanted", "expected"),
    [
        pytest.param({"ruff": "0.17.5"}, "ruff>=0.9", [], id="met"),
        pytest.param({}, "ruff>=0.9", ["ruff: want ruff>=0.9 in requirements-dev.lock, got nothing"], id="missing"),
        pytest.param(
            {"ruff": "0.8"}, "ruff>=0.9", ["ruff: want ruff>=0.9 in requirements-dev.lock, got 0.8"], id="too old"
        ),
        pytest.param({}, "torch>=9", [], id="torch is chosen elsewhere"),
    ],
)
def test_lock_is_compared_with_what_the_project_asks_for(
    pinned: dict[str, str], wanted: str, expected: list[str]
) -> None:
    assert lock.violations(pinned, [Requirement(wanted)]) == expected


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        pytest.param({"a": "1", "b": "2"}, ["all 2 packages are as they were"], id="same"),
        pytest.param({"a": "3", "c": "1"}, ["a: 1 -> 3", "b: 2 -> nothing", "c: nothing -> 1"], id="other"),
    ],
)
def test_what_locking_changed_is_told(after: dict[str, str], expected: list[str]) -> None:
    assert lock.changes({"a": "1", "b": "2"}, after) == expected


def test_lock_must_hold_what_a_locked_package_needs() -> None:
    found = lock.violations({"pytest-xdist": "3.8.0"}, [Requirement("pytest-xdist")])
    assert {message.split(":")[0] for message in found} == {"execnet", "pytest"}
