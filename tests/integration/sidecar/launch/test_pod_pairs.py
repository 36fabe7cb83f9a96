"""Pods that test with each other before they have ranks: real launchers, real collectives, and children that lie."""

import json
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.gpu.one_device import as_host, ranks_of_nccl
from tests.integration.sidecar.launch.test_launcher_processes import AgentDouble, Begin, python
from tests.processes import is_gone
from tests.waiting import wait_until

from unbroken_core.pod.pod_messages import EndPairs, Shutdown
from unbroken_core.protocol import wire
from unbroken_core.protocol.messages import PairOrder, PairState
from unbroken_core.vocabulary.findings import PREFLIGHT, Finding, Health, Verdict

WORKER = python("print('trains', flush=True)")
HOSTILE = Path(__file__).with_name("hostile_pairs.py")
LONG_S, SHORT_S = 90.0, 3.0
"""Nobody waits for the long one; the short one is what a test takes that does not end."""
PATIENCE_S = 280.0
"""For the next word of a launcher: the pod's own checks come before, which a busy machine may hold up for minutes."""
TERM = 3
pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def start() -> Iterator[Begin]:
    """Start launchers, each in a folder of its own with a short path."""
    folder = Path(tempfile.mkdtemp(prefix="ubl-", dir="/tmp"))
    made: list[AgentDouble] = []

    def begin(command: list[str], **variables: str) -> AgentDouble:
        own = folder / str(len(made))
        own.mkdir()
        made.append(AgentDouble(own, command, 1, variables))
        return made[-1]

    yield begin
    for double in made:
        double.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def image(tmp_path: Path) -> dict[str, str]:
    """Return the environment of an image whose Python runs hostile code when it starts."""
    shutil.copy(HOSTILE, tmp_path / "sitecustomize.py")
    return {
        "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
        "UNBROKEN_PREIMPORT": "",
        "UNBROKEN_PREFLIGHT": "250",
        "UNBROKEN_PREFLIGHT_PAIRS": "1",
        "OMP_NUM_THREADS": "1",
        "HOSTILE_LINE": wire.encode(Health(tuple(Finding(check, "", Verdict.OK) for check in PREFLIGHT))),
    }


def begin(start: Begin, image: dict[str, str], kind: str = "", **more: Any) -> AgentDouble:
    agent = start(WORKER, HOSTILE=kind, **(image | more))
    agent.limit_s = PATIENCE_S
    return agent


def meet(
    place: AgentDouble, partner: AgentDouble, number: int, within_s: float = LONG_S, port: int = 0, gpus: int = 0
) -> None:
    """Order two pods to test with each other."""
    state, _other = (agent.wait_pairs(lambda said: said.port) for agent in (place, partner))
    for side, agent in enumerate((place, partner)):
        agent.say(PairOrder(TERM, number, side, "127.0.0.1", port or state.port, gpus, within_s))


def answer(agent: AgentDouble, number: int) -> tuple[bool | None, str]:
    said = agent.wait_pairs(lambda said: (said.term, said.number) == (TERM, number))
    return said.has_passed, said.why


def train(agent: AgentDouble) -> None:
    """Let the pod's process do its work."""
    agent.wait_for(lambda said: True)
    agent.spawn()
    assert agent.wait_exit().exit_code == 0
    agent.wait_output("trains")


def children_of(agent: AgentDouble) -> list[psutil.Process]:
    """Return all processes of a pod's preflight."""
    every = psutil.Process(agent.process.pid).children(recursive=True)
    return [each for each in every if "unbroken.preflight.in_pod" in each.cmdline()]


def test_two_pods_pass_again_and_again_and_then_have_ranks(start: Begin, image: dict[str, str]) -> None:
    one, other = begin(start, image), begin(start, image)
    for number in (1, 2):
        meet(one, other, number) if number == 1 else meet(other, one, number)
        assert [answer(agent, number) for agent in (one, other)] == [(True, "")] * 2
    children = [child for agent in (one, other) for child in children_of(agent)]
    assert len(children) >= 4
    for agent in (one, other):
        assert agent.health is not None
        assert {each.verdict for each in agent.health.findings} == {Verdict.OK}
        agent.say(EndPairs())
        assert agent.wait_pairs(lambda said: not said.port).has_passed is True
        train(agent)
    wait_until(lambda: all(is_gone(child.pid) for child in children), "the end of what has tested")


@pytest.mark.gpu
def test_two_pods_with_gpus_pass_with_nccl_again_and_again(start: Begin, image: dict[str, str], tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs GPUs, got none")
    one, other = (begin(start, image, **as_host(name, tmp_path)) for name in ("one", "other"))
    assert [agent.wait_pairs(lambda said: said.port).gpus for agent in (one, other)] == [1, 1]
    for number in (1, 2):
        meet(one, other, number, gpus=1)
        assert [answer(agent, number) for agent in (one, other)] == [(True, "")] * 2
    assert ranks_of_nccl(tmp_path, 2) == [0, 0, 1, 1]


def test_a_partner_that_is_not_there_is_a_failure_after_its_time(start: Begin, image: dict[str, str]) -> None:
    agent = begin(start, image)
    state = agent.wait_pairs(lambda said: said.port)
    agent.say(PairOrder(TERM, 1, 0, "127.0.0.1", state.port, 0, SHORT_S))
    has_passed, why = answer(agent, 1)
    assert has_passed is False
    assert why
    assert agent.wait_pairs(lambda said: True).port == state.port
    train(agent)


def test_a_connection_that_hangs_is_a_failure_of_who_goes_there(start: Begin, image: dict[str, str]) -> None:
    """A port that takes connections and says nothing, as behind a link that is cut one way."""
    one, other = begin(start, image), begin(start, image)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        meet(one, other, 1, SHORT_S, deaf.getsockname()[1])
        assert answer(other, 1)[0] is False
        # The store is its own: that it is not reached says nothing of the way to others.
        assert answer(one, 1)[0] in (None, False)
    meet(one, other, 2)
    assert [answer(agent, 2)[0] for agent in (one, other)] == [True, True]


def test_data_that_is_corrupted_on_the_way_is_a_failure_of_both(start: Begin, image: dict[str, str]) -> None:
    one, other = begin(start, image), begin(start, image, "corrupt")
    meet(one, other, 1)
    found = [answer(agent, 1) for agent in (one, other)]
    assert False in [has_passed for has_passed, _why in found]
    assert any(why.startswith("WrongDataError: all_") for _passed, why in found)


def test_a_newer_order_ends_a_test_that_hangs(start: Begin, image: dict[str, str]) -> None:
    one, other = begin(start, image), begin(start, image)
    state = one.wait_pairs(lambda said: said.port)
    one.say(PairOrder(TERM, 1, 0, "127.0.0.1", state.port, 0, LONG_S))
    meet(one, other, 2)
    assert [answer(agent, 2) for agent in (one, other)] == [(True, "")] * 2


def test_an_agent_that_was_restarted_is_told_again(start: Begin, image: dict[str, str]) -> None:
    one, other = begin(start, image), begin(start, image)
    meet(one, other, 1)
    assert answer(one, 1)[0] is True
    one.hang_up()
    one.pairs = None
    one.listen()
    one.accept()
    assert answer(one, 1)[0] is True


def test_a_pod_whose_partner_is_killed_amid_a_test_goes_on(start: Begin, image: dict[str, str]) -> None:
    one, other = begin(start, image), begin(start, image)
    state = one.wait_pairs(lambda said: said.port)
    one.say(PairOrder(TERM, 1, 0, "127.0.0.1", state.port, 0, SHORT_S))
    other.wait_pairs(lambda said: said.port)
    for child in children_of(other):
        child.send_signal(signal.SIGKILL)
    assert other.wait_pairs(lambda said: not said.port).number == 0
    assert answer(one, 1)[0] is False
    for agent in (one, other):
        train(agent)


def test_an_order_for_a_pod_that_does_not_test_changes_nothing(start: Begin, image: dict[str, str]) -> None:
    agent = begin(start, image, UNBROKEN_PREFLIGHT_PAIRS="")
    agent.say(PairOrder(TERM, 1, 0, "127.0.0.1", 9, 0, SHORT_S))
    agent.say(EndPairs())
    train(agent)
    assert agent.pairs is None


ANSWER = PairState(0, "", 0, TERM, 1, False, "a lie")


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        pytest.param("say", "no JSON", id="garbage"),
        pytest.param("say", wire.encode(PairState(0, "", 0, TERM, 2, False, "a lie")), id="another order's answer"),
        pytest.param("say", wire.encode(PairState(0, "", 0, TERM - 1, 1, False, "a lie")), id="another term's"),
        pytest.param("twice", wire.encode(ANSWER), id="two answers"),
        pytest.param("say", wire.encode(Health(())), id="its own checks again"),
        pytest.param("flood", "x" * 1000, id="a flood"),
        pytest.param("silent", "", id="silence"),
        pytest.param("stop", "", id="stops itself"),
        pytest.param("exit", "", id="exits"),
        pytest.param("unread", "", id="closes what it is told on"),
    ],
)
def test_whatever_a_test_process_does_its_pod_takes_no_more_tests_and_trains(
    start: Begin, image: dict[str, str], kind: str, line: str
) -> None:
    agent = begin(start, image, kind, HOSTILE_PAIRS=json.dumps(line))
    agent.wait_pairs(lambda said: said.port)
    agent.say(PairOrder(TERM, 1, 0, "127.0.0.1", 9, 0, 1.0))
    said = agent.wait_pairs(lambda said: not said.port)
    assert said.number == (1 if kind == "twice" else 0)
    train(agent)
    wait_until(lambda: not children_of(agent), "the end of what has tested")


def test_a_job_that_is_over_waits_for_no_test(start: Begin, image: dict[str, str]) -> None:
    agent = begin(start, image)
    state = agent.wait_pairs(lambda said: said.port)
    agent.say(PairOrder(TERM, 1, 0, "127.0.0.1", state.port, 0, LONG_S))
    children = children_of(agent)
    agent.say(Shutdown(0, 1.0, "done"))
    assert agent.process.wait(60) == 0
    wait_until(lambda: all(is_gone(child.pid) for child in children), "the end of what has tested")
