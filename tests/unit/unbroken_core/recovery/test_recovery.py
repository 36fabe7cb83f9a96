"""Each row of the choice after an interruption."""

from dataclasses import replace
from typing import Any

import pytest

from unbroken_core.ranks.worlds import Shortage, World
from unbroken_core.recovery import ladder
from unbroken_core.recovery.ladder import Fail, RestartJob, Situation, TakeWorld, WaitForHelp, choose
from unbroken_core.vocabulary.reasons import Reason, Rung

ALL = frozenset(Rung)
SAME = World(2, 2)
SPARE = World(2, 2, num_left=1, promoted=("c",))
SMALLER = World(1, 1, num_closed=1, num_left=1)
TOO_FEW = Shortage(1, 1, "1 healthy pod of at least 2")

BASE = Situation(
    now_s=100.0,
    possible=ALL,
    is_in_process=True,
    is_job_rung=False,
    respawning=[],
    respawn_until_s=700.0,
    outcome=SAME,
    has_respawned=False,
    num_living_pods=2,
    num_starting_pods=0,
    num_possible_pods=3,
    replicas=2,
    minimum_replicas=2,
    shortage_until_s=700.0,
    startup_s=600.0,
)


def chosen(**changes: Any) -> str:
    choice = choose(replace(BASE, **changes))
    match choice:
        case WaitForHelp(reason=reason, rung=rung):
            return f"wait {reason} {rung}"
        case TakeWorld(rung=rung):
            return f"cut {rung}"
        case RestartJob():
            return "job"
        case Fail(reason=reason):
            return f"fail {reason}"


def without(*rungs: Rung) -> frozenset[Rung]:
    return ALL - set(rungs)


APART = {"outcome": TOO_FEW, "is_kept_apart": True}
DEAD = {"respawning": ["pod-b"], "outcome": TOO_FEW}
LOST = {"num_living_pods": 1, "outcome": TOO_FEW}
JOB = {"is_job_rung": True, "outcome": TOO_FEW}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, "cut in-process", id="exception"),
        pytest.param({"has_respawned": True}, "cut process", id="process came back"),
        pytest.param({"is_in_process": False}, "cut process", id="job without in-process restarts"),
        pytest.param(DEAD | {"outcome": SPARE}, "cut pod", id="process died, spare ready: promoted before respawned"),
        pytest.param(
            DEAD | {"outcome": SPARE, "is_in_process": False},
            "wait WaitingForWorkers process",
            id="without in-process restarts the process comes back first",
        ),
        pytest.param(DEAD, "wait WaitingForWorkers process", id="process died, no spare ready"),
        pytest.param(
            DEAD | {"outcome": SMALLER}, "wait WaitingForWorkers process", id="process is waited for before shrinking"
        ),
        pytest.param(DEAD | {"outcome": SMALLER, "respawn_until_s": 100.0}, "cut world", id="process time box is over"),
        pytest.param(DEAD | {"outcome": SMALLER, "possible": without(Rung.PROCESS)}, "cut world", id="no process rung"),
        pytest.param(DEAD | {"possible": without(Rung.PROCESS)}, "job", id="no process rung, cannot shrink: job"),
        pytest.param(
            DEAD | {"possible": without(Rung.PROCESS, Rung.JOB)},
            "fail RestartBudgetExhausted",
            id="no rung is left",
        ),
        pytest.param(LOST | {"outcome": SPARE}, "cut pod", id="pod lost, spare ready"),
        pytest.param(LOST | {"outcome": SMALLER}, "cut world", id="pod lost, no spare, may shrink"),
        pytest.param(
            LOST | {"outcome": SMALLER, "num_starting_pods": 1, "last_call_until_s": 105.0},
            "wait WaitingForPods None",
            id="shortage over, one more is starting: last call",
        ),
        pytest.param(
            {"outcome": replace(SMALLER, num_closed=0, num_left=0), "num_starting_pods": 1, "last_call_until_s": 105.0},
            "wait WaitingForPods None",
            id="the last world was small and is whole again, one more is starting: last call",
        ),
        pytest.param(
            {"num_starting_pods": 1, "last_call_until_s": 105.0}, "cut in-process", id="all are there: no last call"
        ),
        pytest.param(
            LOST | {"outcome": SMALLER, "num_starting_pods": 1, "last_call_until_s": 100.0},
            "cut world",
            id="shortage over, last call over",
        ),
        pytest.param(
            LOST | {"outcome": SMALLER, "last_call_until_s": 105.0}, "cut world", id="shortage over, nobody is starting"
        ),
        pytest.param(LOST, "wait BelowMinimumReplicas None", id="pod lost, no spare, may not shrink"),
        pytest.param(APART, "wait BelowMinimumReplicas None", id="the layers keep spares away, a pod is replaced"),
        pytest.param(APART | {"shortage_until_s": 100.0}, "job", id="the layers keep spares away, no pod came in time"),
        pytest.param(
            APART | {"possible": without(Rung.POD, Rung.JOB)},
            "fail RestartBudgetExhausted",
            id="the layers keep spares away, nobody may be waited for",
        ),
        pytest.param(LOST | {"shortage_until_s": 100.0}, "fail BelowMinimumReplicas", id="no pod came in time"),
        pytest.param(
            LOST | {"num_living_pods": 2, "num_starting_pods": 1},
            "wait BelowMinimumReplicas None",
            id="a new pod is starting: no reason to restart everything",
        ),
        pytest.param(
            LOST | {"num_living_pods": 2, "num_starting_pods": 1, "shortage_until_s": 100.0},
            "job",
            id="the new pod did not start in time",
        ),
        pytest.param(
            LOST | {"possible": without(Rung.POD, Rung.JOB)},
            "fail BelowMinimumReplicas",
            id="a new pod would be of no use",
        ),
        pytest.param(
            LOST | {"hopeless": "pod-b worker 0 ended 5 times: exited with code 3", "shortage_until_s": 100.0},
            "fail FailedBeforeReady",
            id="a place was given up",
        ),
        pytest.param(
            LOST | {"hopeless": "pod-b worker 0 ended 5 times: exited with code 3", "num_possible_pods": 1},
            "fail FailedBeforeReady",
            id="the script does not start: nobody will come",
        ),
        pytest.param({"num_barren": 4, "no_progress_limit": 3}, "fail NoProgress", id="too many faults in a row"),
        pytest.param({"num_barren": 3, "no_progress_limit": 3}, "cut in-process", id="the last fault that is allowed"),
        pytest.param({"num_barren": 100}, "cut in-process", id="no limit of faults in a row"),
        pytest.param({"num_barren": 101}, "fail NoProgress", id="too many faults in a row, whatever they say"),
        pytest.param(JOB, "wait WaitingForWorkers job", id="job rung: processes are starting"),
        pytest.param(JOB | {"outcome": SAME}, "cut job", id="job rung: all are ready"),
        pytest.param(JOB | {"outcome": SMALLER}, "wait WaitingForWorkers job", id="job rung: waits for all"),
        pytest.param(JOB | {"outcome": SMALLER, "respawn_until_s": 100.0}, "cut job", id="job rung: fewer"),
        pytest.param(JOB | {"respawn_until_s": 100.0}, "fail RecoveryTimeout", id="job rung: too few in time"),
        pytest.param(JOB | {"num_living_pods": 1}, "wait BelowMinimumReplicas None", id="job rung: a pod was lost"),
    ],
)
def test_choice(changes: dict[str, object], expected: str) -> None:
    assert chosen(**changes) == expected


def test_a_failure_says_what_was_used_up_and_what_is_missing() -> None:
    view = replace(BASE, outcome=TOO_FEW, possible=frozenset({Rung.WORLD}), spent=("process (3 in 60 s)",))
    assert choose(view) == Fail(
        Reason.BUDGET_EXHAUSTED,
        "no rung of the ladder is left (possible: world; used up: process (3 in 60 s)); 1 healthy pod of at least 2",
    )


def test_the_steps_of_the_ladder_are_those_of_its_table_in_that_order() -> None:
    table = [line.split()[0] for line in str(ladder.__doc__).splitlines() if line.startswith("    _")]
    assert [check.decide.__name__ for check in ladder.LADDER] == table


def test_a_step_whose_rung_is_not_possible_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    give_up = ladder.LadderStep(Rung.WORLD, lambda _view: Fail(Reason.NO_PROGRESS, "a step of our own"))
    monkeypatch.setattr(ladder, "LADDER", (give_up, *ladder.LADDER))
    assert chosen() == "fail NoProgress"
    assert chosen(possible=without(Rung.WORLD)) == "cut in-process"
