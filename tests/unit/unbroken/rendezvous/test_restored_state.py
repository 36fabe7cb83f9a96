"""What a new rendezvous knows of those before it."""

import logging
from pathlib import Path

import pytest

from unbroken.rendezvous.config import read_config
from unbroken.rendezvous.restored_state import TermFile, uses_on_clock
from unbroken_core.coordinator.coordinator import Coordinator
from unbroken_core.coordinator.events import AgentJoined, Observed, Send
from unbroken_core.protocol import wire
from unbroken_core.protocol.messages import PROTOCOL, Earlier, Hello, Observation, Plan, RungUse, WorkerState
from unbroken_core.protocol.settings import JobSettings, RungBudget
from unbroken_core.protocol.wire import settings_to_json
from unbroken_core.vocabulary.errors import InputError
from unbroken_core.vocabulary.reasons import Rung, WorkerPhase

SETTINGS = JobSettings("digits", replicas=1)
ENVIRONMENT = {
    "UNBROKEN_SETTINGS": settings_to_json(SETTINGS),
    "UNBROKEN_TOKEN_FILE": "/token",
    "UNBROKEN_LISTEN": "127.0.0.1:29600",
}


def test_a_term_that_was_used_in_the_pod_is_known_after_a_restart(tmp_path: Path) -> None:
    assert TermFile(tmp_path).read() == (0, -1)
    file = TermFile(tmp_path)
    file.write(7, -1)
    file.write(9, 4)
    file.write(9, -1)
    assert TermFile(tmp_path).read() == (9, 4)
    (tmp_path / "term").write_text("8\n")
    assert TermFile(tmp_path).read() == (8, -1), "as former versions have written it"
    assert [path.name for path in tmp_path.iterdir()] == ["term"]


def test_a_term_file_that_cannot_be_read_or_written_costs_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "term").write_text("seven")
    with caplog.at_level(logging.WARNING):
        assert TermFile(tmp_path).read() == (0, -1)
        TermFile(tmp_path / "missing").write(3, 0)
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "term not known",
        "term not kept",
    ]


def test_earlier_uses_of_rungs_come_onto_the_clock_of_this_process() -> None:
    uses = (RungUse(Rung.POD, 39.5), RungUse(Rung.PROCESS, 100.0), RungUse(Rung.JOB, -1.0))
    found = uses_on_clock(Earlier(uses=uses), now_s=50.0)
    assert found == [(Rung.PROCESS, -50.0), (Rung.POD, 10.5), (Rung.JOB, 50.0)]


def test_what_the_operator_tells_of_earlier_coordinators_is_read_from_the_environment() -> None:
    earlier = Earlier(3, 8, (RungUse(Rung.POD, 12.5),))
    config = read_config({**ENVIRONMENT, "UNBROKEN_EARLIER": wire.encode(earlier), "UNBROKEN_DIR": "/run"})
    assert (config.earlier, config.folder) == (earlier, Path("/run"))
    assert (read_config(ENVIRONMENT).earlier, read_config(ENVIRONMENT).folder) == (Earlier(), None)
    with pytest.raises(InputError, match="UNBROKEN_EARLIER: message: want JSON"):
        read_config({**ENVIRONMENT, "UNBROKEN_EARLIER": "no"})


def test_numbers_go_on_when_everything_was_replaced_at_once() -> None:
    coordinator = Coordinator(SETTINGS, 100.0, term=4, highest_iteration=8)
    state = WorkerState(0, 0, WorkerPhase.READY, -1, "127.0.0.1", 5000)
    hello = Hello(PROTOCOL, "digits", "digits-9", "uid", "s", "node", 1, workers=(state,))
    # The operator has seen the end of those that were replaced.
    coordinator.step(Observed(Observation({}, is_accounted=True)), 100.0)
    actions = coordinator.step(AgentJoined("one", hello), 100.0)
    messages = [action.message for action in actions if isinstance(action, Send)]
    (plan,) = [message for message in messages if isinstance(message, Plan)]
    assert (plan.term, plan.iteration) == (4, 9)


def test_budgets_that_earlier_coordinators_have_used_stay_used() -> None:
    budget = RungBudget(Rung.POD, limit=2, window_s=60.0)
    uses = [(Rung.POD, 30.0), (Rung.POD, 90.0), (Rung.JOB, 95.0)]
    coordinator = Coordinator(JobSettings("digits", replicas=1, rungs=(budget,)), 100.0, uses=uses)
    ladder = coordinator._job.budgets
    assert ladder.num_uses(Rung.POD, 100.0) == 1
