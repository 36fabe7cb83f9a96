"""What probes, checks of others, paths and lines of workers say, followed to every place that shows it: it is text,
bounded, and does nothing there."""

import json
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse
from tests.answers import ask
from tests.integration.cli.test_hostile_text import EVIL, assert_harmless
from tests.integration.cli.test_live_page import Pager
from tests.waiting import LIMIT_S

from unbroken_core.vocabulary.findings import MAX_FINDINGS

MARKUP = "<script>window.hacked=1</script><img src=x onerror=alert(1)>\"'`{{7*7}}"
PRINTED = EVIL.replace("\x00", "").replace("\r\n", "\x0b") + MARKUP
"""All of it in one line."""
PROBES = {
    "ansi": "printf '%s' \"$EVIL\"; exit 1",
    "huge": "head -c 1048576 /dev/zero | tr '\\0' '\\033'; exit 1",
    "binary": "printf '\\377\\376\\000\\200\\033[2J'; exit 1",
    "lines": "printf '\\n\\n%s\\nI unbroken.agent: forged\\n' \"$EVIL\"; exit 1",
    "odd": "printf '%s' \"$EVIL\"; exit 77",
}
EXTENSION = f"""
import itertools, time
from unbroken.watch.checks.check import Check, Judgement
from unbroken_core.vocabulary.findings import Finding, Verdict
EVIL = {PRINTED!r}
numbers = itertools.count()

class Spiteful(Exception):
    def __repr__(self):
        return EVIL * 20000

def judge_many(_history, _sample):
    # Other names with each look: what counts by name would grow without end.
    names = [f"{{next(numbers)}} {{EVIL}}" for _ in range(60)]
    return Judgement(tuple(Finding("many", name, Verdict.SUSPECT, "fan", "look", EVIL * 9) for name in names), None)

def judge_flood(_history, _sample):
    return Judgement(tuple(Finding("flood", f"fan {{n}}", Verdict.FATAL) for n in range(5000)), None)

def judge_spite(_history, _sample):
    raise Spiteful(EVIL)

many = Check("many", 1.0, lambda: None, judge_many)
flood = Check("flood", 1.0, lambda: None, judge_flood)
spite = Check("spite", 1.0, lambda: None, judge_spite)
bad = Spiteful(EVIL)
"""
SCRIPT = f"""
import os, time
from pathlib import Path
from unbroken import inprocess

@inprocess.Wrapper()
def train(call: inprocess.CallWrapper):
    step = 0
    while not Path(os.environ["TEST_DONE"]).exists():
        os.write(1, b"slow: \\xff\\xfe" + {PRINTED!r}.encode() + b"A" * 5000 + b"\\n")
        call.ping(step=step)
        step += 1
        time.sleep(0.05)  # a step of the script; the file alone ends it

train()
"""


@pytest.fixture
def job(start_job: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Start a job whose watches hear and whose workers print whatever does harm in a terminal, a page or a metric."""
    package = tmp_path / "others"
    (package / "others-1.0.dist-info").mkdir(parents=True)
    (package / "others-1.0.dist-info/METADATA").write_text("Name: others\nVersion: 1.0\n")
    names = "".join(f"{name} = others:{name}\n" for name in ("many", "flood", "spite", "bad"))
    (package / "others-1.0.dist-info/entry_points.txt").write_text(f"[unbroken.health]\n{names}")
    (package / "others.py").write_text(EXTENSION)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    probes = [
        {"name": name, "command": ["sh", "-c", text], "periodSeconds": 1, "verdict": "suspect"}
        for name, text in PROBES.items()
    ]
    monkeypatch.setenv("EVIL", PRINTED)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(package), os.environ.get("PYTHONPATH", ""))))
    monkeypatch.setenv("UNBROKEN_WATCH_DELAY", "0")
    monkeypatch.setenv("UNBROKEN_WATCH_PROBES", json.dumps(probes))
    monkeypatch.setenv("UNBROKEN_WATCH_STORAGE", f"/{PRINTED.replace(':', '').replace('/', '')[:100]}")
    rules = json.dumps([{"name": "slow", "pattern": "^slow: ", "verdict": "slow"}])
    options = ("--pods", "1", "--health", "Observe", "--log-rules", rules)
    return start_job(*options, workload="wrapped", command=[str(script)])


def findings(job: Any) -> list[dict[str, Any]]:
    health = job.status().get("health") or {}
    return [item["finding"] for item in health.get("findings", ())]


def seen(job: Any) -> bool:
    """Return whether all that speaks has been heard."""
    checks = {each["check"] for each in findings(job)}
    unchecked = dict((job.status().get("health") or {}).get("unchecked", ()))
    silent = {"odd", "flood", "spite", "extensions", "storage"}
    return {"ansi", "huge", "binary", "lines", "many", "log-lines"} <= checks and silent <= unchecked.keys()


def series(job: Any) -> set[tuple[str, str]]:
    """Return what both servers of metrics tell, by name and labels."""
    found: set[tuple[str, str]] = set()
    for module in ("unbroken.rendezvous", "unbroken.agent"):
        (process,) = job.parts(module)
        code, text = ask(f"http://{process.environ()['UNBROKEN_METRICS_LISTEN']}/metrics")
        assert code == 200
        assert_harmless(text, f"metrics of {module}")
        found |= {(sample.name, str(sample.labels)) for family in parse(text) for sample in family.samples}
    return found


def highest(job: Any) -> int:
    return max(int(each["entity"].split(" ")[0]) for each in findings(job) if each["check"] == "many")


def strings(value: Any) -> Iterator[str]:
    """Yield all texts of a JSON value."""
    if isinstance(value, str):
        yield value
    for item in value.items() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from strings(item)


def check_page(words: list[str]) -> None:
    """The live page's own server makes all text harmless; the page sets it as text."""
    pager = Pager(*words)
    try:
        link = pager.link()
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        opener.open(link, timeout=LIMIT_S).close()
        with opener.open(urljoin(link, "/page/status"), timeout=LIMIT_S) as answer:
            told = list(strings(json.load(answer)))
    finally:
        pager.process.terminate()
        assert pager.process.wait(LIMIT_S) == 0
        assert pager.process.stdout is not None
        pager.process.stdout.close()
    assert any("hacked" in text for text in told)
    for text in told:
        assert_harmless(text, "the live page")


@pytest.mark.timeout(300)
def test_findings_are_bounded_text_wherever_they_are_shown(job: Any) -> None:
    job.wait_for(lambda: seen(job), "a word of everybody")
    found = findings(job)
    assert len(found) <= MAX_FINDINGS
    assert max(len(each["message"]) for each in found) <= 300
    assert max(len(each["entity"]) for each in found) <= 128
    assert "forged" in json.dumps(found)
    before, number = series(job), highest(job)
    job.wait_for(lambda: highest(job) > number + 120, "other names")
    assert {name for name, _labels in series(job)} == {name for name, _labels in before}
    assert len(series(job)) <= len(before) + 4, "labels of things that are found"
    words = shlex.split(re.findall(r"see it live: unbroken page (.*)", job.text())[0])
    for command in ("status", "why", "timeline", "topology"):
        done = subprocess.run(
            [sys.executable, "-m", "unbroken", command, *words], capture_output=True, check=False, timeout=LIMIT_S
        )
        shown = (done.stdout + done.stderr).decode()
        assert done.returncode == 0, shown
        assert_harmless(shown, command)
        assert max(map(len, shown.splitlines())) < 5000
        if command in ("status", "why"):
            assert "hacked" in shown
    check_page(words)
    # What workers print is on stdout, and stays as it is.
    errors = job.errors.read_text()
    assert "found in" in errors
    assert_harmless(errors, "unbroken run, its agents and watches")
    assert job.complete() == 0
