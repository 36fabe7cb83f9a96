"""No test is left out silently: a skip needs a reason from the closed table below, anything else fails.

A test skips by `pytest.skip(reason)` or `skipif(reason=)` with a reason that one pattern of NEEDS finds. The variable
UNBROKEN_REQUIRE lists the needs that are met for sure on this machine (`cluster,helm`, as CI sets it): a skip for one
of them fails as well, since it would mean that the test did not see what is there.
"""

import gc
import os
import re
from collections.abc import Generator
from typing import Any

import hypothesis
import pytest

# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile(
    "unbroken", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow], print_blob=True
)
hypothesis.settings.load_profile("unbroken")

NEEDS = {
    "cluster": r"UNBROKEN_TEST_KUBECONFIGS",
    "helm": r"\bhelm\b",
    "prometheus": r"\bpromtool\b",
    "chromium": r"\bchromium\b",
    "netns": r"network namespaces",
    "gpu": r"\bGPUs?\b",
    "root": r"\bonly root\b",
}
"""Pattern that finds each need in the reason of a skip."""


def skip_violation(reason: str, required: frozenset[str]) -> str | None:
    """Return why this skip is not allowed, or None when it is."""
    needs = sorted(name for name, pattern in NEEDS.items() if re.search(pattern, reason))
    if not needs:
        return f"skipped for a reason that tests/conftest.py does not list: want one of {sorted(NEEDS)}, got {reason!r}"
    must = sorted(required.intersection(needs))
    return f"skipped, but UNBROKEN_REQUIRE says that {', '.join(must)} is there: {reason!r}" if must else None


def required_needs(text: str) -> frozenset[str]:
    """Read UNBROKEN_REQUIRE. Raises pytest.UsageError for a word that is not a need."""
    words = frozenset(word.strip() for word in text.split(",") if word.strip())
    if unknown := sorted(words - set(NEEDS)):
        raise pytest.UsageError(f"UNBROKEN_REQUIRE: want words of {sorted(NEEDS)}, got {unknown}")
    return words


def _reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    longrepr = report.longrepr
    return str(longrepr[2] if isinstance(longrepr, tuple) else longrepr).removeprefix("Skipped: ")


def _judge(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.outcome != "skipped" or hasattr(report, "wasxfail"):
        return
    violation = skip_violation(_reason_of(report), required_needs(os.environ.get("UNBROKEN_REQUIRE", "")))
    if violation is not None:
        report.outcome, report.longrepr = "failed", violation


def pytest_configure() -> None:
    required_needs(os.environ.get("UNBROKEN_REQUIRE", ""))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin the longest tests first: one that begins last is waited for alone."""
    items.sort(key=lambda item: item.get_closest_marker("first") is None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadgroup` run the tests of one real API server one after the other, beside those of another.

    An operator of the whole cluster would serve the jobs of other tests. pytest-xdist's own groups are none with
    pytest 9.2, which lets no plugin rename a test.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]  # the package brings no types

    class ByServer(LoadScopeScheduling):  # type: ignore[misc]  # a base without types
        def _split_scope(self, nodeid: str) -> str:
            return "modern" if "[modern" in nodeid else "full"

    return ByServer(config, log)


def pytest_collection_finish() -> None:
    # Three thousand collected tests and all of their modules stay: looking through them again and again for garbage
    # took half of the time of tests that make many objects.
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _judge(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _judge(report)
    return report
