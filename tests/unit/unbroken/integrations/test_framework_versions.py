"""A framework that is too old or too new is said plainly."""

import importlib
import logging
import sys
from importlib import metadata
from types import ModuleType

import pytest

from unbroken.integrations.versions import require


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        ("4.57.1", r"^frame: want 5\.2 or newer, got 4\.57; pip install 'frame>=5\.2'$"),
        ("5.1.9", r"got 5\.1;"),
        ("5", r"got 5\.0;"),
        ("1!5.3", "got nothing that can be read;"),
        (None, "got nothing that can be read;"),
        ("unknown" * 1000, "got nothing that can be read;"),
        ("9" * 5000 + ".1", "got nothing that can be read;"),
    ],
)
def test_release_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch, seen: str | None, message: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda package: seen)
    with pytest.raises(ImportError, match=message):
        require("frame", (5, 2), (5, 23))


def test_package_that_is_missing_is_refused() -> None:
    with pytest.raises(ImportError, match="got nothing that can be read"):
        require("unbroken-has-no-such-package", (1, 0), (1, 0))


@pytest.mark.parametrize(
    ("integration", "package", "seen"),
    [
        ("huggingface", "transformers", "4.30"),
        ("huggingface", "accelerate", "0.20"),
        ("lightning", "lightning", "1.6"),
        ("torchtitan", "torchtitan", "0.2"),
    ],
)
def test_release_that_lacks_what_an_integration_imports_is_named(
    monkeypatch: pytest.MonkeyPatch, integration: str, package: str, seen: str
) -> None:
    """And not the name that it lacks."""
    for framework in ("transformers", "accelerate", "lightning", "torchtitan"):
        monkeypatch.setitem(sys.modules, framework, ModuleType(framework))
    module = f"unbroken.integrations.{integration}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(metadata, "version", lambda asked: seen if asked == package else "99.0")
    with pytest.raises(ImportError, match=rf"^{package}: want [0-9.]+ or newer, got {seen}; pip install '{package}>="):
        importlib.import_module(module)


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        ("5.2.0rc1", []),
        ("5.99", []),
        ("6.0.0.dev0", ["frame 6.0 is newer than what this was tested with (5.23): compare your losses"]),
    ],
)
def test_release_of_a_later_major_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seen: str, words: list[str]
) -> None:
    monkeypatch.setattr(metadata, "version", lambda package: seen)
    with caplog.at_level(logging.WARNING):
        require("frame", (5, 2), (5, 23))
    assert caplog.messages == words


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        ("0.3.9", []),
        ("0.4.0", ["frame 0.4 is newer than what this was tested with (0.3): compare your losses"]),
        ("1.0", ["frame 1.0 is newer than what this was tested with (0.3): compare your losses"]),
    ],
)
def test_a_minor_is_a_major_before_the_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, seen: str, words: list[str]
) -> None:
    monkeypatch.setattr(metadata, "version", lambda package: seen)
    with caplog.at_level(logging.WARNING):
        require("frame", (0, 3), (0, 3))
    assert caplog.messages == words
