"""The rule that no test is left out silently, shown by running pytest on small test files."""

import ast
import re
import textwrap
from pathlib import Path

import pytest
from tests import conftest
from tools import sum_results

pytest_plugins = ["pytester"]

CONFTEST = Path(__file__).parents[2] / "conftest.py"


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A test suite of its own that has the project's conftest.py."""
    monkeypatch.delenv("UNBROKEN_REQUIRE", raising=False)
    pytester.makeconftest(CONFTEST.read_text())
    return pytester


def write(suite: pytest.Pytester, text: str) -> None:
    suite.makepyfile(test_case=textwrap.dedent(text))


def test_skip_for_a_listed_need_is_allowed(suite: pytest.Pytester) -> None:
    write(suite, "import pytest\ndef test_it(): pytest.skip('UNBROKEN_TEST_KUBECONFIGS is not set')")
    suite.runpytest_inprocess().assert_outcomes(skipped=1)


def test_skip_for_any_other_reason_fails_and_names_the_reason(suite: pytest.Pytester) -> None:
    write(suite, "import pytest\n@pytest.mark.skip(reason='flaky today')\ndef test_it(): pass")
    result = suite.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*does not list*flaky today*"])


def test_skip_of_a_whole_module_for_a_missing_package_fails(suite: pytest.Pytester) -> None:
    write(suite, "import pytest\npytest.importorskip('no_such_package')\ndef test_it(): pass")
    assert suite.runpytest_inprocess().ret == pytest.ExitCode.INTERRUPTED


def test_skip_for_a_need_that_is_required_fails(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNBROKEN_REQUIRE", "helm, cluster")
    write(suite, "import pytest\ndef test_it(): pytest.skip('no helm here')")
    result = suite.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*UNBROKEN_REQUIRE says that helm is there*"])


@pytest.mark.parametrize(
    ("need", "reason"),
    [
        ("cluster", "UNBROKEN_TEST_KUBECONFIGS names no API server 'full'"),
        ("netns", "no network namespaces: want root with CAP_NET_ADMIN and CAP_SYS_ADMIN"),
    ],
)
def test_fixture_of_a_conftest_further_down_may_not_skip_what_is_required(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, need: str, reason: str
) -> None:
    folder = suite.mkdir("below")
    fixture = f'import pytest\n@pytest.fixture(scope="session")\ndef thing(): pytest.skip({reason!r})\n'
    (folder / "conftest.py").write_text(fixture)
    (folder / "test_below.py").write_text("def test_it(thing): pass\ndef test_too(thing): pass\n")
    suite.runpytest_inprocess().assert_outcomes(skipped=2)
    monkeypatch.setenv("UNBROKEN_REQUIRE", need)
    result = suite.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines([f"*UNBROKEN_REQUIRE says that {need} is there*"])


def test_every_skip_of_this_suite_gives_a_listed_need_as_its_reason_and_no_need_is_listed_for_nothing() -> None:
    reasons = [
        ast.unparse(call.args[0])
        for path in sorted(CONFTEST.parent.rglob("*.py"))
        if path != Path(__file__)
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.skip"
    ]
    needs_by_reason = {
        reason: {need for need, pattern in conftest.NEEDS.items() if re.search(pattern, reason)} for reason in reasons
    }
    assert [reason for reason, needs in needs_by_reason.items() if not needs] == []
    assert set().union(*needs_by_reason.values()) == set(conftest.NEEDS)


def test_ci_requires_what_it_brings() -> None:
    text = (CONFTEST.parents[1] / ".ci" / "run").read_text()
    for line in (
        "UNBROKEN_REQUIRE=cluster,helm$extras tests",
        "UNBROKEN_REQUIRE=helm$extras",
        "extras=,netns",
        "extras+=,prometheus",
        "extras+=,chromium",
    ):
        assert line in text


def test_expected_failure_is_not_taken_for_a_skip(suite: pytest.Pytester) -> None:
    write(suite, "import pytest\n@pytest.mark.xfail(reason='known')\ndef test_it(): assert False")
    suite.runpytest_inprocess().assert_outcomes(xfailed=1)


def test_required_need_that_does_not_exist_stops_the_run(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNBROKEN_REQUIRE", "clustre")
    write(suite, "def test_it(): pass")
    result = suite.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*UNBROKEN_REQUIRE: want words of*clustre*"])


def test_sum_says_again_what_failed_and_counts_steps(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        "import pytest\ndef test_one(): pass\n@pytest.mark.parametrize('n', range(50))\ndef test_bad(n): assert n < 0"
    )
    write(suite, text)
    suite.runpytest_inprocess("--junitxml=unit.xml")
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", ["sum_results", "--step=demo=0", "--step=audit=skipped", "unit.xml", "none.xml"])
    assert sum_results.main() == 1
    *failed, more, total = capsys.readouterr().out.splitlines()
    assert failed[1].startswith("unit: test_case::test_bad[1]: assert 1 < 0")
    assert (len(failed), more, total) == (40, "and 10 more", "2 passed, 51 failed, 1 skipped")
