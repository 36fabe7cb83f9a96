"""A pod that tests itself before its first process: a real launcher, and preflights that do what they like."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.sidecar.launch.test_launcher_processes import AgentDouble, Begin, python, start
from tests.processes import is_gone
from tests.waiting import wait_until

from unbroken.launch.preflight_process import MAX_OUTPUT_BYTES
from unbroken_core.pod.pod_messages import Shutdown
from unbroken_core.protocol import wire
from unbroken_core.vocabulary.findings import LOOPBACK, MATMUL, PREFLIGHT, Finding, Health, Verdict

__all__ = ["start"]
HOSTILE = Path(__file__).with_name("hostile_preflight.py")
WRONG = Finding(MATMUL, "cuda:0", Verdict.FATAL, message="12 of 16777216 products are wrong")
UNTOLD = Finding(LOOPBACK, "", Verdict.UNKNOWN, "no-answer")
LONG, SHORT = "200", "8"
"""Seconds: nobody waits for the long one; in the short one a process that gets no processor for a while has begun."""
WORKER = python("print('trains', flush=True)")
pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def image(tmp_path: Path) -> dict[str, str]:
    """Return the environment of an image whose Python runs hostile code when it starts."""
    shutil.copy(HOSTILE, tmp_path / "sitecustomize.py")
    return {
        "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
        "UNBROKEN_PREIMPORT": "",
        "HOSTILE_PIDS": str(tmp_path / "pids"),
        "HOSTILE_LINE": wire.encode(Health((WRONG, UNTOLD))),
    }


def begin(start: Begin, image: dict[str, str], kind: str, limit_s: str = LONG, **more: Any) -> AgentDouble:
    return start(WORKER, UNBROKEN_PREFLIGHT=limit_s, HOSTILE=kind, **(image | more))


def found_by(agent: AgentDouble) -> Health:
    """Return what the preflight has found; until then the agent hears of no place."""
    health = agent.wait_health()
    assert agent.processes is None
    return health


def wait_gone(pids: str) -> None:
    wait_until(lambda: all(is_gone(int(pid)) for pid in pids.split()), f"the end of the processes {pids}")


def train(agent: AgentDouble) -> None:
    """Let the pod's process do its work."""
    agent.wait_for(lambda said: True)
    agent.spawn()
    assert agent.wait_exit().exit_code == 0


NOTHING = dict.fromkeys(PREFLIGHT, Verdict.UNKNOWN)
TOLD = {MATMUL: Verdict.FATAL, LOOPBACK: Verdict.UNKNOWN}


@pytest.mark.parametrize(
    ("kind", "found", "why"),
    [
        pytest.param("hang", TOLD, "no end within 8 s", id="hangs, deaf to signals"),
        pytest.param("stop", TOLD, "no end within 8 s", id="stops itself"),
        pytest.param("close", TOLD, "no end within 8 s", id="closes its end, and lives"),
        pytest.param("exit", TOLD, "its process ended before", id="exits oddly"),
        pytest.param("crash", TOLD, "its process ended before", id="crashes"),
        pytest.param(
            "flood", NOTHING, f"it says more than {MAX_OUTPUT_BYTES} bytes", id="floods without an end of line"
        ),
        pytest.param("lines", NOTHING, f"it says more than {MAX_OUTPUT_BYTES} bytes", id="floods with lines"),
        pytest.param("garbage", NOTHING, "what it says cannot be read", id="prints garbage"),
    ],
)
def test_whatever_a_preflight_does_the_pod_goes_on_and_what_was_not_seen_is_unknown(
    start: Begin, image: dict[str, str], kind: str, found: dict[str, Verdict], why: str
) -> None:
    agent = begin(start, image, kind, SHORT if "no end" in why else LONG)
    health = found_by(agent)
    assert {each.check: each.verdict for each in health.findings} == found
    assert {each.message for each in health.findings if each.verdict is Verdict.UNKNOWN} == {why}
    train(agent)
    agent.wait_output("trains")


def test_what_a_preflight_has_started_ends_with_it(start: Begin, image: dict[str, str]) -> None:
    agent = begin(start, image, "hang", SHORT)
    found_by(agent)
    wait_gone(Path(image["HOSTILE_PIDS"]).read_text())


def test_a_preflight_speaks_of_its_own_checks_only(start: Begin, image: dict[str, str]) -> None:
    forged = wire.encode(Health((Finding("gpu-events", "GPU-a", Verdict.FATAL, "xid-79"),)))
    agent = begin(start, image, "exit", HOSTILE_LINE=forged)
    assert {each.check: each.verdict for each in found_by(agent).findings} == NOTHING


def test_an_agent_that_was_restarted_is_told_again(start: Begin, image: dict[str, str]) -> None:
    agent = begin(start, image, "exit")
    first = found_by(agent)
    agent.wait_for(lambda said: True)
    agent.hang_up()
    agent.listen()
    agent.accept()
    assert agent.wait_health() == first


def test_a_job_that_is_over_does_not_wait_for_it(start: Begin, image: dict[str, str]) -> None:
    agent = begin(start, image, "hang", "3600")
    pids = wait_until(
        lambda: Path(image["HOSTILE_PIDS"]).exists() and Path(image["HOSTILE_PIDS"]).read_text(), "its pid"
    )
    agent.say(Shutdown(0, 1.0, "done"))
    assert agent.process.wait(60) == 0
    wait_gone(str(pids))


def test_a_sound_pod_is_well_and_its_first_process_comes_after(start: Begin, image: dict[str, str]) -> None:
    agent = begin(start, image, "well")
    health = found_by(agent)
    found = {each.check: (each.verdict, each.message) for each in health.findings}
    assert {verdict for verdict, _ in found.values()} == {Verdict.OK}, found
    assert set(found) == set(PREFLIGHT)
    train(agent)


def test_a_pod_with_fewer_gpus_than_it_should_have_says_so(start: Begin, image: dict[str, str]) -> None:
    agent = begin(start, image, "well", UNBROKEN_PREFLIGHT_DEVICES="512")
    (wrong,) = (each for each in found_by(agent).findings if each.verdict is Verdict.FATAL)
    assert wrong.check == "preflight-devices"
    assert wrong.message.startswith("want 512 GPUs, got ")
    agent.wait_output("[unbroken.launch] preflight-devices is fatal: want 512 GPUs")


def test_of_several_pods_of_a_terminal_it_is_said_which_one_finds_it(start: Begin, image: dict[str, str]) -> None:
    more = {"UNBROKEN_PREFLIGHT": LONG, "HOSTILE": "no-torch"}
    agent = start(WORKER, 1, "--supervised", **(image | more))
    agent.wait_output("[unbroken.launch] digits-0: preflight-matmul is unknown: torch cannot be imported")
    train(agent)


def test_without_the_setting_no_process_is_started_for_it(start: Begin, image: dict[str, str]) -> None:
    mark = f"open({image['HOSTILE_PIDS']!r}, 'a').write(' '.join(sys.orig_argv) + chr(10))"
    Path(image["PYTHONPATH"].partition(":")[0], "sitecustomize.py").write_text(f"import sys; {mark}\n")
    agent = start(WORKER, **image)
    train(agent)
    started = Path(image["HOSTILE_PIDS"]).read_text().splitlines()
    assert [line.partition(" -m ")[2].partition(" ")[0] or line for line in started] == [
        "unbroken.launch",
        " ".join((sys.executable, *WORKER[1:])),
    ]
    assert agent.health is None


def test_a_device_that_computes_wrong_numbers_is_named(start: Begin, image: dict[str, str]) -> None:
    agent = begin(start, image, "product")
    found = {each.check: (each.entity, each.verdict, each.message) for each in found_by(agent).findings}
    message = "float32: 1 of 65536 products are wrong"
    assert found.pop(MATMUL) == ("cpu", Verdict.FATAL, message)
    assert {verdict for _, verdict, _ in found.values()} == {Verdict.OK}, found
    agent.wait_output(f"preflight-matmul on cpu is fatal: {message}")
    train(agent)


def test_a_device_that_does_not_answer_is_unknown_and_hides_no_other_check(start: Begin, image: dict[str, str]) -> None:
    agent = begin(start, image, "hanging-product", "40")
    found = {each.check: each for each in found_by(agent).findings}
    assert (found[MATMUL].verdict, found[MATMUL].code) == (Verdict.UNKNOWN, "no-answer")
    assert found[MATMUL].message.startswith("no end within ")
    assert {each.verdict for each in found.values()} <= {Verdict.OK, Verdict.UNKNOWN}
    train(agent)


def test_an_image_without_torch_is_unknown_and_trains(start: Begin, image: dict[str, str]) -> None:
    agent = begin(start, image, "no-torch")
    findings = found_by(agent).findings
    assert {each.verdict for each in findings} == {Verdict.UNKNOWN}
    assert all(each.message.startswith("torch cannot be imported: ModuleNotFoundError: ") for each in findings)
    train(agent)


@pytest.mark.gpu
def test_a_pod_with_gpus_tests_each_of_them(start: Begin, image: dict[str, str]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs GPUs, got none")
    num_gpus = torch.cuda.device_count()
    agent = begin(start, image, "well", UNBROKEN_PREFLIGHT_DEVICES=str(num_gpus))
    found = {each.check: (each.verdict, each.message) for each in found_by(agent).findings}
    assert found[MATMUL] == (Verdict.OK, f"{num_gpus + 1} tests passed")
    assert {verdict for verdict, _ in found.values()} == {Verdict.OK}, found
