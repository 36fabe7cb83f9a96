"""The rule that no test is left out silently, shown by running pytest on small test files."""

import textwrap
from pathlib import Path

import pytest

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
