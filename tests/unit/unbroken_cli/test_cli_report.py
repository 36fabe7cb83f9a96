"""The page that `unbroken timeline --html` writes."""

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from unbroken_cli.report import html_report

from .test_cli_text import NOW, condition, job_of, record, running

EVIL = "</td><script>alert(1)</script><img src=https://example.com/x onerror=y>"


class Page(HTMLParser):
    """Collects tags, and whether each is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "line"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def a_page(**status: Any) -> Page:
    """Return the page of a job with hostile words everywhere."""
    event = {"lastTimestamp": "2026-01-01T00:01:01Z", "type": "Normal", "reason": EVIL, "message": EVIL}
    text = html_report(job_of(running(**status), [event]), NOW)
    assert not re.search(r"https?://(?!example\.com/x)", text), "it needs nothing else"
    return Page(text)


def test_the_page_tells_each_fault_with_its_phases_and_needs_nothing_else() -> None:
    page = a_page()
    assert page.open == []
    assert not {"script", "img", "link", "iframe", "object"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "href")]
    assert page.tags.count("circle") == 2
    assert page.tags.count("rect") == 8, "two recoveries of four phases"
    for words in (
        "TRAINING, iteration 2: 8 ranks train",
        "process-signal: signal 9",
        "rank 3, pod digits-1",
        "0.412 s",
    ):
        assert words in page.text
    assert any("default-src 'none'" in (value or "") for _, value in page.attributes)


def test_the_page_draws_where_the_time_went() -> None:
    page = a_page(time={"progressSeconds": 90.0, "redoSeconds": 10.0})
    assert "Where the time went" in page.text
    assert "redo 10.0 s, 10.00%" in page.text
    assert page.tags.count("rect") == 8 + 2
    assert page.open == []


def test_no_word_of_a_job_becomes_markup() -> None:
    last = {"time": "2026-01-01T00:02:00Z", "detail": EVIL, "domain": EVIL}
    page = a_page(
        lastInterruption=last,
        history=[record(1, rung=EVIL, cause=EVIL, seconds={EVIL: 1.0}), record(2, pod=EVIL, node=EVIL)],
        conditions=[condition("Running", "True", "Training", EVIL)],
    )
    assert page.open == []
    assert not {"script", "img"} & set(page.tags)
    assert page.text.count("<script>alert(1)</script>") >= 6


@pytest.mark.parametrize(
    "history",
    [
        pytest.param([], id="no fault"),
        pytest.param([record(1, endedAt=None, rung="", seconds={})], id="one that is not repaired yet"),
        pytest.param([record(1, startedAt="", seconds={"stop": 0.0})], id="one without a time"),
    ],
)
def test_jobs_with_little_to_tell_have_a_page_too(history: list[dict[str, Any]]) -> None:
    page = a_page(history=history)
    assert page.open == []
    assert ("No fault so far." in page.text) is (history == [])


def test_a_job_that_failed_at_its_first_fault_is_not_said_to_have_had_none() -> None:
    page = a_page(history=[], state="Failed")
    assert "No fault" not in page.text
    assert "It had no recovery." in page.text


def test_the_page_shows_no_number_where_there_is_none() -> None:
    unknown = condition("Running", "Unknown", "WaitingForRendezvous", "it does not answer")
    status = running(state="Unknown", conditions=[unknown], iteration=-1)
    del status["ranks"]
    text = html_report(job_of(status), NOW)
    assert [re.findall(rf"<b>([^<]*)</b><span class=\"dim\">{name}<", text) for name in ("active ranks", "lost")] == [
        ["?"]
    ] * 2
    assert '<b>-</b><span class="dim">iteration<' in text
