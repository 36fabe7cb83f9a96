"""Log rules on real processes: what workers print ends, restarts or names, and nothing of it is lost or waited for."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WORKLOAD = str(Path(__file__).parents[1] / "log_workload.py")


def start(start_job: Callable[..., Any], kind: str, *rules: dict[str, Any], options: tuple[str, ...] = ()) -> Any:
    given = ("--log-rules", json.dumps(rules)) if rules else ()
    return start_job("--pods", "2", *given, *options, workload="wrapped", command=[WORKLOAD, kind])


def recovered(job: Any, number: int = 1) -> dict[str, Any] | None:
    """Return a recovery once it is over."""
    found = [item for item in job.status()["recoveries"] if item["number"] == number and item["ended_at"]]
    return found[0] if found else None


def rule(name: str, pattern: str, verdict: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "pattern": pattern, "verdict": verdict, **fields}


@pytest.mark.timeout(300)
def test_a_fatal_line_restarts_the_worker_that_printed_it(start_job: Callable[..., Any]) -> None:
    job = start(start_job, "once", rule("disk", "^fatal: .* gone$", "fatal-restart"))
    recovery = job.wait_for(lambda: recovered(job), "a recovery")
    assert (recovery["cause"], recovery["rung"], recovery["rank"]) == ("log-rule", "in-process", 1)
    assert recovery["detail"] == "log rule disk: a line matches: fatal: the disk is gone"
    assert job.complete() == 0
    assert "log rule disk" in job.text()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["once", "raise"])
def test_a_line_that_stops_the_job_does_so_also_where_the_worker_fails_right_after_it(
    kind: str, start_job: Callable[..., Any]
) -> None:
    job = start(start_job, kind, rule("disk", "disk is gone", "fatal-stop"))
    assert job.wait_for_exit() == 1
    assert "failed: rank 1 (log-workload-1): log rule disk: a line matches: " in job.text()


@pytest.mark.timeout(300)
def test_a_line_that_stops_the_job_does_so_also_where_the_agent_ends_before_it_could_tell(
    start_job: Callable[..., Any],
) -> None:
    job = start(start_job, "asked", rule("disk", "disk is gone", "fatal-stop"), options=("--heartbeat-timeout", "120"))
    job.wait_for(lambda: job.text().count("step 1\n") == 2, "both workers")
    agent = job.part_of_pod("unbroken.agent", "log-workload-1")
    agent.suspend()
    (job.folder / "asked").touch()
    job.wait_for(lambda: "fatal: the disk is gone" in job.text(), "the line")
    # The launcher has told it after a quarter of a second, and a step takes longer than it may seem.
    num_steps = job.text().count("step")
    job.wait_for(lambda: job.text().count("step") > num_steps + 100, "more lines")
    agent.kill()
    assert job.wait_for_exit() == 1
    assert "failed: rank 1 (log-workload-1): log rule disk: a line matches: fatal: the disk is gone" in job.text()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("silent", {"recurringSeconds": 2}, "log rule step: no line has matched for 2 s; "),
        ("steps", {"expectedWithinSeconds": 2, "pattern": "epoch"}, "log rule step: no line has matched within 2 s; "),
    ],
)
def test_a_line_that_does_not_come_is_a_hang_and_all_ranks_say_what_they_do(
    kind: str, fields: dict[str, Any], said: str, start_job: Callable[..., Any]
) -> None:
    job = start(start_job, kind, {**rule("step", "step [0-9]", "hang"), **fields}, options=("--no-progress-limit", "1"))
    assert job.wait_for_exit() == 1
    assert said in job.text()
    assert "soft-timeout" in job.text()
    assert "in their own code (log_workload.py:" in job.text()


@pytest.mark.timeout(300)
def test_a_line_that_says_slow_is_told_and_nothing_happens(start_job: Callable[..., Any]) -> None:
    job = start(start_job, "steps", rule("io", "step 3$", "slow"))

    def findings() -> list[tuple[str, str]] | None:
        found = (job.status().get("health") or {}).get("findings", ())
        told = sorted((item["pod"], item["finding"]["message"]) for item in found)
        return told if len(told) == 2 else None

    told = job.wait_for(findings, "what is slow in both pods")
    messages = sorted(message for _pod, message in told)
    assert messages == ["rank 0: a line matches: step 3", "rank 1: a line matches: step 3"]
    assert job.status()["recoveries"] == []
    assert job.complete() == 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("limit", [(), ("--no-progress-limit", "2")])
def test_a_rule_that_matches_everything_ends_at_the_limit_of_a_script_that_always_fails(
    limit: tuple[str, ...], start_job: Callable[..., Any]
) -> None:
    job = start(start_job, "steps", rule("all", ".*", "fatal-restart"), options=limit)
    assert job.wait_for_exit() == 1
    assert "in a row without progress between them" in job.text()
    assert "log rule all: a line matches: step" in job.text()


@pytest.mark.timeout(300)
def test_ten_megabytes_without_an_end_a_flood_and_garbage_lose_no_output_and_no_time_limit(
    start_job: Callable[..., Any], tmp_path: Path
) -> None:
    """The rules are expensive on purpose, one of them where `re` never ends. Output is whole, in the log as well."""
    rules = [
        rule("explodes", "(x+x+)+y", "fatal-stop"),
        rule("expected", "flooded|step [0-9]", "hang", recurringSeconds=5),
        *(rule(f"r{number}", f"[a-z ]*{number}[a-z]+ never", "fatal-stop") for number in range(6)),
    ]
    logs = tmp_path / "logs"
    job = start(start_job, "flood", *rules, options=("--log-dir", str(logs)))
    job.wait_for(lambda: job.text().count("flooded") == 2, "the end of the flood")
    job.wait_for(lambda: len(list(logs.glob("*/rank-0/0.log"))) == 2, "the logs")
    for log in logs.glob("*/rank-0/0.log"):
        text = job.wait_for(lambda log=log: log.read_bytes() if b"\nstep 9\n" in log.read_bytes() else None, "steps")
        assert text.count(b"x" * (10 << 20)) == 1
        assert text.count(b"step is what it is not\n") == 100_000
    assert job.status()["recoveries"] == []
    assert job.complete() == 0


def test_a_job_without_rules_loads_nothing_of_them_in_any_of_its_processes() -> None:
    """Its launcher is sent no Follow (tests/unit/unbroken/agent/test_log_lines.py), without which it loads no more."""
    words = "unbroken.launch.launcher, unbroken.agent.shell, unbroken.inprocess, unbroken.rendezvous.server"
    settings = "wire.settings_from_json(wire.settings_to_json(settings.JobSettings('digits')))"
    loaded = (
        "[name for name in sys.modules if 'line_rules' in name or name.startswith('unbroken_core.protocol.log_rules.')]"
    )
    script = f"import sys, {words}\nfrom unbroken_core.protocol import settings, wire\n{settings}\nprint({loaded})"
    said = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert said == "['unbroken_core.protocol.log_rules.rules']\n", "the type of a rule, which settings name"
