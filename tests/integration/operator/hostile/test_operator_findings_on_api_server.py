"""What pods say of their health, as a real API server keeps and shows it: in conditions, Events and commands."""

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from tests.integration.operator.operator_bench import Bench, bench, operator
from tests.integration.operator.test_operator_on_api_server import RECOVERY, report
from tests.waiting import LIMIT_S, eventually

from unbroken_core.protocol.messages import HealthStatus, PodFinding
from unbroken_core.recovery.health import finding_text
from unbroken_core.vocabulary.findings import LOG_LINES, Finding, Verdict
from unbroken_core.vocabulary.reasons import Cause

EVIL = (
    "\x1b[2J\x1b]0;owned\x07\x9b31m\u202e\r\nI unbroken: forged \u2028\x00\x7f<script>alert(1)</script>\"'`{{7*7}}😀 "
)
LOST = Finding("fans", (EVIL * 4)[:128], Verdict.FATAL, "probe-failed", EVIL[:100], (EVIL * 9)[:300], 3)
SLOW = Finding(LOG_LINES, "slow", Verdict.DEGRADED, message=(EVIL * 9)[:300])


def test_hostile_findings_are_lines_that_do_nothing(kubeconfig: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(kubeconfig, tmp_path) as made:
            await made.apply("digits", replicas=2, spares={"count": 1}, health={"mode": "Act"})
            with operator(made):
                rendezvous = await made.rendezvous("digits")
                async with rendezvous.serving() as address:
                    await made.wait_for_pods("digits-0", "digits-1", "digits-2")
                    await made.run_pod("digits-rendezvous-0", address)
                    pods = await made.pods()
                    found = tuple(
                        PodFinding(
                            f"digits-{number % 3}", "node-a", replace(each, entity=f"{number}{each.entity}"[:128])
                        )
                        for number, each in enumerate((LOST, SLOW) * 32)
                    )
                    unchecked = tuple((f"c{number}.in-part", 1) for number in range(64))
                    held = EVIL * 20
                    health = HealthStatus(3, found, len(found), unchecked, held, 2)
                    blamed = replace(RECOVERY, cause=Cause.DEVICE_FAULT, detail=finding_text(LOST))
                    await rendezvous.say(report(pods, 1, health=health, recoveries=(blamed,), message=EVIL * 30))
                    await look(made)

    asyncio.run(scenario())


async def look(made: Bench) -> None:
    """Look at everything that says it."""

    async def conditions() -> dict[str, str] | None:
        status = (await made.job("digits")).get("status") or {}
        found = {item["type"]: item["message"] for item in status.get("conditions") or ()}
        return found if {"NodesHealthy", "Straggling"} <= found.keys() and status.get("history") else None

    texts = list((await eventually(conditions, "the conditions", describe=made.operator_log)).values())
    for reason in ("DevicesFaulty", "RanksSlow", "Recovered"):

        async def told(reason: str = reason) -> list[str]:
            return [str(item["message"]) for item in await made.events(reason)]

        (message,) = await eventually(told, f"an Event {reason}", describe=made.operator_log)
        assert "forged" in message
        texts.append(message)
    for text in texts:
        assert text.isprintable(), text
        assert len(text) <= 1000
    environment = {**os.environ, "KUBECONFIG": str(made.kubeconfig)}
    for command in ("status", "why", "timeline"):
        words = [sys.executable, "-m", "unbroken", command, "-n", made.namespace, "digits"]
        done = await asyncio.to_thread(
            subprocess.run, words, env=environment, capture_output=True, timeout=LIMIT_S, check=False
        )
        shown = (done.stdout + done.stderr).decode()
        assert done.returncode == 0, shown
        assert "forged" in shown
        assert all(line.isprintable() for line in shown.split("\n")), shown
    log = made.operator_log()
    assert all(line.isprintable() for line in log.split("\n")), log
