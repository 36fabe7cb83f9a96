"""What `unbroken status`, `why` and `timeline` say of a job, from its object and Events."""

import json
from dataclasses import asdict, replace
from datetime import datetime, timezone
from typing import Any

import pytest

from unbroken.run.flags import in_flags
from unbroken_cli.advice import _CAUSES_ON_ONE_MACHINE, _OPTIONS, fault_steps, next_steps
from unbroken_cli.commands.framework import _only
from unbroken_cli.commands.why import find_fault
from unbroken_cli.errors import CommandError
from unbroken_cli.freshness import why_stale
from unbroken_cli.job import JobRecord
from unbroken_cli.report import html_report
from unbroken_cli.sources.from_cluster import job_from_objects
from unbroken_cli.sources.from_rendezvous import job_from_status
from unbroken_cli.text import age, faultless_lines, list_lines, status_lines, timeline_lines, why_lines
from unbroken_core.protocol.messages import JobStatus, OtherFault, Recovery
from unbroken_core.recovery.hangs import LINKS, MISTAKE
from unbroken_core.vocabulary.errors import InputError
from unbroken_core.vocabulary.reasons import Cause, JobPhase, Reason, Rung
from unbroken_operator.decisions.reporting.recovery_text import recovery_sentence

NOW = datetime(2026, 1, 1, 0, 20, tzinfo=timezone.utc)


def condition(kind: str, status: str, reason: str, message: str) -> dict[str, Any]:
    """Return a condition as the operator writes it."""
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": ""}


def record(number: int, **fields: Any) -> dict[str, Any]:
    """Return one recovery of the history."""
    return {
        "term": 1,
        "number": number,
        "cause": "process-signal",
        "rung": "pod",
        "rank": 3,
        "pod": "digits-1",
        "node": "node-a",
        "replacedBy": ["digits-4"],
        "iteration": number,
        "startedAt": f"2026-01-01T00:0{number}:00Z",
        "endedAt": f"2026-01-01T00:0{number}:01Z",
        "seconds": {"detect": 0.001, "stop": 0.4, "plan": 0.001, "enter": 0.01},
        **fields,
    }


def job_of(status: dict[str, Any], events: list[dict[str, Any]] | None = None) -> JobRecord:
    """Return the job that an object with this status is."""
    item = {
        "metadata": {"name": "digits", "namespace": "team-a"},
        "spec": {"template": {"spec": {"containers": [{"name": "trainer"}]}}},
        "status": status,
    }
    return job_from_objects(item, events or [])


def running(**fields: Any) -> dict[str, Any]:
    """Return the status of a job that trains after two faults."""
    return {
        "state": "Running",
        "iteration": 2,
        "ranks": {"active": 8, "spare": 4, "lost": 0},
        "restarts": {"total": 2},
        "ettr": 0.97,
        "conditions": [condition("Running", "True", "Training", "8 ranks train")],
        "history": [record(1), record(2)],
        "lastInterruption": {"time": "2026-01-01T00:02:00Z", "detail": "signal 9", "domain": "rack-1"},
        **fields,
    }


def test_status_says_training_then_fault_then_culprit_then_repair_then_what_to_do() -> None:
    assert status_lines(job_of(running()), NOW) == [
        "digits in namespace team-a: TRAINING, iteration 2: 8 ranks train",
        "  ranks      8 active, 4 spare, 0 lost; restarts 2, ETTR 0.97",
        "  last fault 18 min 0 s ago (2026-01-01T00:02:00Z): process-signal: signal 9   (number 2)",
        "  culprit    rank 3, pod digits-1, node node-a, domain rack-1",
        "  done       rung pod, 0.412 s, iteration 2; digits-4 took over",
        "  next       signal 9: compare the pod's memory limit with its use; others: a crash in native code",
        "             kubectl -n team-a logs digits-1 -c trainer --tail=100   (as long as the pod is there)",
    ]


def test_status_says_where_the_time_went_and_what_share_of_the_ranks_progress_was() -> None:
    spent = {"progressSeconds": 9000.0, "redoSeconds": 900.0, "waitingSeconds": 100.0, "openSeconds": 0.0}
    ranks = {"progressRankSeconds": 60000.0, "heldRankSeconds": 100000.0, "wantedRankSeconds": 80000.0}
    job = job_of(running(time={"term": 1, "reportedAt": "2026-01-01T00:00:00Z", **spent, **ranks}))
    lines = status_lines(job, NOW)
    shares = "progress 90.0%, redo 9.0%, waiting 1.0% of 2.8 h"
    at = lines.index(f"  time       {shares}, as of 20 min 0 s ago (2026-01-01T00:00:00Z)")
    assert lines[at + 1].strip() == "ettr 0.900, ettr_capacity 0.750, goodput_allocated 0.600"
    assert job.time is not None
    assert sum(job.time.values()) == 10000.0


@pytest.mark.parametrize(
    ("status", "first", "advice"),
    [
        pytest.param({}, "no operator has looked at it yet", "an operator runs", id="untouched"),
        pytest.param(
            {
                "state": "Invalid",
                "conditions": [condition("Admitted", "False", "InvalidSpec", "minReplicas: want ...")],
            },
            "the spec is refused: minReplicas: want",
            "correct the field",
            id="invalid",
        ),
        pytest.param(
            running(
                state="Recovering", conditions=[condition("Running", "False", "BelowMinimumReplicas", "1 of 2 pods")]
            ),
            "NOT TRAINING, it recovers: 1 of 2 pods",
            "bring nodes back or add some; the job fails only when enough pods run for timeouts.startupSeconds in vain",
            id="below the minimum",
        ),
        pytest.param(
            running(conditions=[condition("Running", "Unknown", "WaitingForRendezvous", "it does not answer")]),
            "UNKNOWN: it does not answer",
            "component=rendezvous",
            id="rendezvous away",
        ),
        pytest.param(
            running(state="Failed", conditions=[condition("Failed", "True", "NoProgress", "failed 10 times")]),
            "FAILED: failed 10 times",
            "fix the script",
            id="failed",
        ),
        pytest.param(
            running(ranks={"active": 6, "spare": 0, "lost": 2}), "TRAINING", "add nodes: 2 ranks", id="degraded"
        ),
        pytest.param(
            running(history=[record(1), record(2), record(3, node="node-b")]),
            "TRAINING",
            "kubectl cordon node-a",
            id="one node again and again",
        ),
    ],
)
def test_status_names_the_state_first_and_advice_that_fits_it(status: dict[str, Any], first: str, advice: str) -> None:
    lines = status_lines(job_of(status), NOW)
    assert first in lines[0]
    assert any(advice in line for line in lines[1:]), lines


def test_no_node_is_blamed_for_pods_that_were_deleted_or_moved() -> None:
    deleted = [record(number, cause="pod-leaving", pod=f"digits-{number}") for number in (1, 2)]
    lines = status_lines(job_of(running(history=[*deleted, record(3, node="node-b")])), NOW)
    assert not any("cordon" in line for line in lines), lines


def a_run(*history: dict[str, Any]) -> JobRecord:
    """Return a job that was asked at its rendezvous, as one of `unbroken run` is."""
    return replace(job_of(running(history=list(history))), namespace="")


@pytest.mark.parametrize("cause", sorted(_CAUSES_ON_ONE_MACHINE))
def test_no_node_is_to_be_looked_at_where_all_pods_are_processes_of_one_machine(cause: str) -> None:
    again = [record(1, cause=cause, node="local-1"), record(2, cause=cause, node="local-1")]
    job = a_run(record(3, node="local-2"), *again)
    text = "\n".join((*next_steps(job, NOW), *fault_steps(job, job.faults[-1])))
    assert "cordon" not in text
    assert "node local-1" not in text
    assert "see what only the pod at local-1 has to do: it was the culprit's place in 2 of the last 3 faults" in text


def test_a_node_of_which_nobody_says_whose_it_is_is_left_out() -> None:
    job = a_run(record(1), record(2), record(3, node="node-b"))
    assert any("leave node-a out, on Kubernetes by kubectl cordon node-a" in step for step in next_steps(job, NOW))


@pytest.mark.parametrize("by", ["", "log rule loss: no line has matched for 600 s; "])
@pytest.mark.parametrize(
    ("said", "advice"),
    [
        pytest.param(f"{MISTAKE}: ranks wait", "let all ranks call the same collectives", id="mistake"),
        pytest.param(f"no rank: all have begun it: {LINKS} between them", "test the links between", id="links"),
    ],
)
def test_a_hang_that_is_understood_is_answered_by_what_it_is(by: str, said: str, advice: str) -> None:
    job = job_of(running(history=[record(1, cause="soft-timeout")]))
    fault = replace(job.faults[0], detail=by + said)
    (step, _log) = fault_steps(job, fault)
    assert step.startswith(advice)
    assert not step.startswith("if steps may take this long")


POSTED = "3 of 4 training pods run; the API server refused digits-3: POST /api/v1/namespaces/ml/pods:"


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        pytest.param(f"{POSTED} 400 quantities must match", "correct spec.template, or revert", id="malformed"),
        pytest.param(f"{POSTED} 422 Pod is invalid: spec.x", "correct spec.template, or revert", id="invalid"),
        pytest.param(
            f"{POSTED} 422 Pod is invalid".replace("digits-3", "digits-rendezvous-3"),
            "correct spec.rendezvous, or revert",
            id="the rendezvous",
        ),
        pytest.param(f"{POSTED} 403 exceeded quota", "raise the quota", id="quota"),
        pytest.param(f'{POSTED} 400 admission webhook "p" denied the request: no', "change the policy", id="webhook"),
        pytest.param(f"{POSTED} 422 ValidatingAdmissionPolicy 'p' denied request", "change the policy", id="policy"),
    ],
)
def test_what_helps_against_a_refusal_follows_from_what_the_api_server_answered(message: str, advice: str) -> None:
    """And nobody is told to delete pods that nothing can replace."""
    old = condition("UpToDate", "False", "TemplateOutdated", "2 of 2; delete them one by one, spares first")
    refused = condition("PodsReady", "False", "WriteRefused", message)
    for state, held in (("Running", "True"), ("Recovering", "False")):
        trains = condition("Running", held, "BelowMinimumReplicas", "1 of 2 pods")
        steps = next_steps(job_of(running(state=state, conditions=[trains, refused, old])), NOW)
        assert advice in steps[0]
        assert steps[1:] == ("until then delete no pods of this job: nothing can take their place",)


def test_why_finds_the_detail_of_an_old_fault_in_its_event() -> None:
    message = (
        "rank 3 (pod digits-1, node node-a): process-signal: signal 11; recovered by rung pod in 0.412 s "
        "(detect 0.001), iteration 0 -> 1; digits-4 took over"
    )
    event = {"lastTimestamp": "2026-01-01T00:01:01Z", "type": "Normal", "reason": "Recovered", "message": message}
    job = job_of(running(), [event])
    lines = why_lines(job, find_fault(job, "1"), NOW)
    assert lines[0] == "fault 1 of digits in namespace team-a: process-signal: signal 11"
    assert "             stop                0.400 s" in lines
    assert [line.split()[1] for line in timeline_lines(job)[1:]] == ["00:01:00", "00:02:00"]


@pytest.mark.parametrize("detail", ["signal 11", ""])
def test_what_else_failed_in_a_recovery_of_a_cluster_is_found_in_its_event(detail: str) -> None:
    hung = OtherFault(Cause.HARD_TIMEOUT, 5, "digits-2", "did not leave", taken_by="digits-4")
    told = Recovery(
        1, Cause.PROCESS_SIGNAL, Rung.POD, 3, "digits-1", "node-a", "", detail, 0, 1, ("digits-4",), {"stop": 0.4},
        "2026-01-01T00:01:00Z", "2026-01-01T00:01:01Z", 8, 6, num_faults=4, others=(hung,),
    )  # fmt: skip
    message = recovery_sentence(told)
    event = {"lastTimestamp": "2026-01-01T00:01:01Z", "type": "Normal", "reason": "Recovered", "message": message}
    job = job_of(running(), [event])
    lines = why_lines(job, find_fault(job, "1"), NOW)
    where = lines.index("  also       and rank 5 of digits-2: hard-timeout (did not leave)")
    assert lines[where + 1] == "             and 2 more faults"
    assert lines[0].endswith(f"process-signal{': signal 11' if detail else ''}")
    assert not [line for line in why_lines(job, find_fault(job, "2"), NOW) if "also" in line]


def test_why_shows_the_frames_of_the_culprit() -> None:
    job = job_of(running())
    fault = replace(find_fault(job, "1"), stack=("train.py:7 in train", "data.py:3 in load"))
    lines = why_lines(job, fault, NOW)
    assert lines[lines.index("  stack      train.py:7 in train") + 1] == "             data.py:3 in load"


def test_why_says_when_the_detail_of_an_old_fault_is_forgotten() -> None:
    job = job_of(running())
    assert any("not kept" in line for line in why_lines(job, find_fault(job, "1"), NOW))


def test_faults_of_several_coordinators_are_told_apart_by_term() -> None:
    job = job_of(running(history=[record(1), record(1, term=2)]))
    assert [fault.id for fault in job.faults] == ["1.1", "2.1"]


def test_a_fault_that_is_not_kept_is_refused_with_those_that_are() -> None:
    with pytest.raises(InputError, match=r"numbers 1, 2; got '7'"):
        find_fault(job_of(running()), "7")


def test_a_name_in_several_namespaces_is_refused_with_all_of_them() -> None:
    found = [{"metadata": {"name": "digits", "namespace": name}} for name in ("team-b", "team-a")]
    with pytest.raises(InputError, match=r"several namespaces \(team-a, team-b\)"):
        _only(found, "digits")
    with pytest.raises(CommandError, match="no namespace has one"):
        _only([], "digits")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("2026-01-01T00:19:58Z", "2 s ago"),
        ("2025-12-30T22:20:00Z", "1 d 2 h ago"),
        ("2026-01-01T00:21:00Z", "just now"),
        ("", "at an unknown time"),
    ],
)
def test_ages_have_their_two_largest_units(text: str, words: str) -> None:
    assert age(text, NOW) == words


def test_a_job_of_which_nobody_knows_has_no_numbers_of_ranks() -> None:
    status = running(
        state="Unknown", conditions=[condition("Running", "Unknown", "WaitingForRendezvous", "no node for it. When")]
    )
    del status["ranks"]
    lines = status_lines(job_of(status), NOW)
    assert lines[0] == "digits in namespace team-a: UNKNOWN: no node for it. When"
    assert lines[1].startswith("  ranks      unknown; restarts 2")
    assert not any("add nodes" in line for line in lines)
    assert "   ?  " in list_lines([job_of(status)])[1]


LEASE = "unbroken-system/unbroken"
ANSWERED_AT = "Thu, 01 Jan 2026 00:20:00 GMT"


def lease(**spec: Any) -> dict[str, Any]:
    """Return a Lease that was renewed two seconds before the answer."""
    fresh = {"holderIdentity": "a", "leaseDurationSeconds": 8, "renewTime": "2026-01-01T00:19:58.000000Z"}
    return {"spec": {**fresh, **spec}}


@pytest.mark.parametrize(
    ("item", "date", "part"),
    [
        pytest.param(lease(), ANSWERED_AT, "", id="renewed"),
        pytest.param(lease(renewTime="2026-01-01T00:30:00Z"), ANSWERED_AT, "", id="clocks differ"),
        pytest.param(lease(renewTime="soon"), ANSWERED_AT, "", id="unreadable time"),
        pytest.param(lease(), "yesterday", "", id="unreadable date"),
        pytest.param({}, ANSWERED_AT, "nobody holds its Lease", id="empty"),
        pytest.param(None, "", "its Lease unbroken-system/unbroken is gone", id="gone"),
        pytest.param(lease(holderIdentity=""), ANSWERED_AT, "nobody holds its Lease", id="released"),
        pytest.param(lease(renewTime="2026-01-01T00:18:00Z"), ANSWERED_AT, "120 s ago", id="silent"),
        pytest.param(lease(renewTime="2026-01-01T00:19:48Z"), ANSWERED_AT, "", id="a successor may take over"),
        pytest.param(lease(renewTime="2026-01-01T00:19:47Z"), ANSWERED_AT, "13 s ago", id="and has not: within 15 s"),
        pytest.param(
            lease(renewTime="2026-01-01T00:18:00Z", leaseDurationSeconds="x"), ANSWERED_AT, "120 s ago", id="garbage"
        ),
        pytest.param(
            lease(renewTime="2025-12-31T00:00:00Z", leaseDurationSeconds=1e300), ANSWERED_AT, "s ago", id="for ever"
        ),
    ],
)
def test_a_status_is_as_fresh_as_the_lease_of_its_operator(item: dict[str, Any] | None, date: str, part: str) -> None:
    found = why_stale(LEASE, item, date)
    assert part in found
    assert bool(found) is bool(part)


def test_what_no_operator_keeps_up_to_date_is_not_told_as_true() -> None:
    job = replace(job_of(running()), stale=why_stale(LEASE, None, ""))
    lines = status_lines(job, NOW)
    assert lines[0] == (
        "digits in namespace team-a: UNKNOWN: no operator keeps this up to date: its Lease unbroken-system/unbroken is "
        "gone. What follows was written before"
    )
    assert lines[1] == "  it said    Running: 8 ranks train"
    assert any("bring the operator back" in line for line in lines)
    assert any("as long as its pod is there" in line and "only an operator makes another" in line for line in lines)
    over = replace(job_of(running(state="Complete")), stale=job.stale)
    assert status_lines(over, NOW)[0].startswith("digits in namespace team-a: COMPLETE"), "an end stays true"


def test_a_refused_edit_of_a_job_that_trains_is_told_beside_the_training() -> None:
    status = running()
    status["conditions"].append(
        condition("Admitted", "False", "InvalidSpec", "spec.replicas: got -1; the spec before it stays in force")
    )
    lines = status_lines(job_of(status), NOW)
    assert lines[0].startswith("digits in namespace team-a: TRAINING")
    assert lines[1] == "  spec       refused: spec.replicas: got -1; the spec before it stays in force"
    assert any("correct the field" in line for line in lines)


def test_a_name_in_a_command_is_quoted_whatever_it_holds() -> None:
    evil = "a $(touch x); b #"
    lines = status_lines(job_of(running(history=[record(1, pod=evil, node=evil, cause="node-lost")])), NOW)
    told = "\n".join(line for line in lines if "kubectl" in line)
    assert f"logs '{evil}' -c trainer" in told
    assert f"describe node '{evil}'" in told


def test_a_planned_deletion_is_no_fault_whose_log_one_reads() -> None:
    lines = status_lines(job_of(running(history=[record(1, cause="pod-leaving")])), NOW)
    assert not any("logs digits-1" in line for line in lines)
    assert lines[-1] == "  next       nothing"


def test_a_job_that_never_started_has_lost_no_ranks_and_a_failed_one_has_a_fault() -> None:
    status = running(state="Failed", iteration=-1, ranks={"active": 0, "spare": 0, "lost": 8}, history=[])
    status["conditions"] = [condition("Failed", "True", "FailedBeforeReady", "no process gets ready")]
    lines = status_lines(job_of(status), NOW)
    assert lines[1].startswith("  ranks      0 active, 0 spare; restarts")
    assert lines[2] == "  last fault none recovered: the job failed as said above"


def test_labels_that_are_missing_are_told_as_what_to_do() -> None:
    status = running(history=[])
    status["conditions"].append(
        condition("TopologyKnown", "False", "TopologyLabelMissing", "missing: label rack on node-a")
    )
    lines = status_lines(job_of(status), NOW)
    assert lines[-1] == "  next       label the nodes that the message names: missing: label rack on node-a"


def test_a_new_rendezvous_that_answers_is_not_said_to_be_silent() -> None:
    message = "a new rendezvous waits for the pods: 1 of 2 pods are ready. Training may go on meanwhile"
    status = running(state="Unknown", conditions=[condition("Running", "Unknown", "WaitingForPods", message)])
    (step,) = [line for line in status_lines(job_of(status), NOW) if "component=rendezvous" in line]
    assert step.endswith("(a new one waits for the pods to come back)")


def test_one_missing_rank_is_one() -> None:
    lines = status_lines(job_of(running(ranks={"active": 7, "spare": 0, "lost": 1}, history=[])), NOW)
    assert lines[-1] == "  next       add nodes: 1 rank is missing and no spare waits"


def test_why_of_a_broken_device_says_what_was_found_and_what_was_not_checked() -> None:
    message = "digits-1 on node node-a: xid-79 on GPU-a is fatal; not checked everywhere: ports"
    healthy = condition("NodesHealthy", "False", "DevicesFaulty", message)
    broken = record(1, cause="device-fault")
    lines = why_lines(job := job_of(running(history=[broken], conditions=[healthy])), find_fault(job, "1"), NOW)
    assert f"  nodes      {message}" in lines
    assert "  seen by    the pod's watch: a GPU or a link is broken" in lines
    silent = job_of(running(history=[broken]))
    assert "  nodes      nobody knows: there is no condition NodesHealthy" in why_lines(
        silent, find_fault(silent, "1"), NOW
    )


@pytest.mark.parametrize("cause", ["log-rule", "soft-timeout"])
def test_why_names_the_log_rule_and_the_line_whatever_was_made_of_it(cause: str) -> None:
    detail = "log rule loss: no line has matched for 600 s; rank not known: ranks 0-3 in their own code"
    fault = {"detail": detail, "domain": ""}
    status = running(history=[record(2, cause=cause)], lastInterruption={"time": "2026-01-01T00:02:00Z", **fault})
    text = "\n".join(why_lines(job := job_of(status), find_fault(job, "2"), NOW))
    assert detail in text
    assert "  seen by    the agent, by a log rule: what the worker printed, or did not print" in text
    assert ("raise the rule's seconds" in text) == (cause == "soft-timeout")
    assert "softSeconds" not in text


def test_what_a_log_rule_calls_slow_is_no_slow_node() -> None:
    message = "digits-1 on node n1: log rule io: rank 3: a line matches: retry"
    slow = condition("Straggling", "True", "RanksSlow", message)
    steps = next_steps(job_of(running(history=[], conditions=[slow])), NOW)
    assert steps == (f"see why: {message}",)


STORM = "more than 5 recoveries within 15 minutes; of the last ones 4 pod-leaving, 2 node-lost"
STILL = "no step was reached for the first time in 30 minutes; the newest is 12"
STORM_STEP = f"find what keeps interrupting it, such as evictions, preemption or a roll-out: {STORM}"
STILL_STEP = (
    "find what keeps it from getting on (a hang that no timeout sees, missing pods, checkpoints further apart than "
    f"faults): {STILL}"
)


def test_all_that_failed_in_one_recovery_is_named_with_who_took_over_from_whom() -> None:
    hung = OtherFault(Cause.HARD_TIMEOUT, 3, "small-3", "no progress for 10 s", taken_by="small-4")
    raised = OtherFault(Cause.EXCEPTION, 1, "small-1", "ValueError: boom")
    fault = Recovery(
        2, Cause.PROCESS_EXIT, Rung.POD, 2, "small-2", "", "", "exited 7", 0, 1, ("small-4",), {"stop": 10.0},
        "2026-01-01T00:10:00Z", "2026-01-01T00:10:10Z", num_faults=3, others=(hung, raised),
    )  # fmt: skip
    job = job_from_status(
        JobStatus(1, "small", 1, 1, JobPhase.RUNNING, Reason.TRAINING, "", 1, 4, 0, 0, (), {}, {}, (fault,), -1, None)
    )
    also = [
        "  also       and rank 3 of small-3: hard-timeout (no progress for 10 s)",
        "             and rank 1 of small-1: exception (ValueError: boom)",
    ]
    taken = "rung pod, 10.000 s, iteration 1; small-4 took over from small-3"
    for lines in (status_lines(job, NOW), why_lines(job, job.faults[0], NOW)):
        where = lines.index(also[0])
        assert lines[where : where + 2] == also
        assert f"  done       {taken}" in lines
    (line,) = timeline_lines(job)[1:]
    assert line.endswith(
        "process-exit: exited 7, and rank 3 of small-3: hard-timeout (no progress for 10 s), "
        f"and rank 1 of small-1: exception (ValueError: boom) -> {taken}"
    )
    shown = json.loads(json.dumps(asdict(job.faults[0])))
    assert (shown["num_faults"], shown["others"][0]) == (3, {**asdict(hung), "cause": "hard-timeout"})
    same = OtherFault(Cause.PROCESS_EXIT, 0, "small-0", "exited 7")
    alike = replace(job.faults[0], others=(same, replace(same, rank=4, pod="small-5"), hung), num_faults=4)
    assert "  also       and rank 0 of small-0, rank 4 of small-5: the same" in why_lines(job, alike, NOW)
    crowd = replace(job.faults[0], num_faults=70)
    assert "             and 67 more faults" in why_lines(job, crowd, NOW)
    hang = replace(job.faults[0], cause="soft-timeout", num_faults=8, others=())
    assert "  also       and 7 more that failed or only waited" in why_lines(job, hang, NOW)
    assert "and rank 3 of small-3: hard-timeout" in html_report(job, NOW)


def in_trouble(state: str, storm: str, still: str, num_faults: int = 0, cause: str = "exception") -> JobRecord:
    """Return a job with these statuses of RestartStorm and NoProgress, and faults of the last minutes."""
    conditions = [
        condition("Running", "True", "Training", "8 ranks train"),
        *([condition("RestartStorm", storm, "KeepsRecovering", STORM)] if storm else []),
        *([condition("NoProgress", still, "StandsStill", STILL)] if still else []),
    ]
    times = {"startedAt": "2026-01-01T00:19:00Z", "endedAt": "2026-01-01T00:19:01Z"}
    history = [record(number, cause=cause, node="", **times) for number in range(1, num_faults + 1)]
    return job_of(running(state=state, history=history, conditions=conditions))


@pytest.mark.parametrize(
    ("job", "wanted"),
    [
        pytest.param(in_trouble("Running", "True", ""), [STORM_STEP], id="a storm that no faults explain"),
        pytest.param(in_trouble("Recovering", "True", ""), [STORM_STEP], id="while it recovers"),
        pytest.param(in_trouble("Running", "True", "", 6, "pod-leaving"), [STORM_STEP], id="moves are no faults"),
        pytest.param(in_trouble("Running", "", "True"), [STILL_STEP], id="no progress"),
        pytest.param(in_trouble("Recovering", "", "True"), [STILL_STEP], id="no progress while it recovers"),
        pytest.param(in_trouble("Running", "True", "True"), [STILL_STEP, STORM_STEP], id="both"),
        pytest.param(in_trouble("Running", "False", "False"), [], id="both are over"),
        pytest.param(in_trouble("Running", "Unknown", "Unknown"), [], id="nobody knows"),
        pytest.param(in_trouble("Complete", "True", "True"), [], id="the job is over"),
        pytest.param(in_trouble("Suspended", "True", "True"), [], id="it is suspended"),
    ],
)
def test_of_a_job_that_keeps_recovering_or_stands_still_why_says_what_to_look_for(
    job: JobRecord, wanted: list[str]
) -> None:
    assert [step for step in next_steps(job, NOW) if STORM in step or STILL in step] == wanted
    said = why_lines(job, job.faults[-1], NOW) if job.faults else faultless_lines(job, NOW)
    assert [line.removeprefix("  next").strip() for line in said if STORM in line or STILL in line] == wanted


def test_six_faults_of_a_storm_are_counted_by_their_cause_and_the_condition_is_not_repeated() -> None:
    steps = next_steps(in_trouble("Running", "True", "", 6), NOW)
    counted = "find what the last 6 faults have in common, all of them exception: unbroken timeline -n team-a digits"
    assert counted in steps
    assert STORM_STEP not in steps
    assert STORM_STEP in next_steps(in_trouble("Running", "True", "", 5), NOW), "five are no storm"


@pytest.mark.parametrize("state", ["Running", "Complete"])
@pytest.mark.parametrize("is_watched", [True, False])
def test_of_an_operator_without_a_lease_nobody_can_tell_whether_it_is_there(state: str, is_watched: bool) -> None:
    item = {
        "metadata": {
            "name": "digits",
            "managedFields": [
                {"time": "2026-01-01T00:19:59Z", "manager": "kubectl"},
                {"time": "2026-01-01T00:06:00Z", "manager": "operator", "subresource": "status"},
            ],
        },
        "status": running(state=state) | ({"lease": "default/operator"} if is_watched else {}),
    }
    head, *rest = status_lines(job_from_objects(item), NOW)
    is_said = state == "Running" and not is_watched
    assert ("TRAINING when this was written" in head) is is_said
    assert any("as of      14 min 0 s ago (2026-01-01T00:06:00Z)" in line for line in rest) is is_said
    assert any("ask the rendezvous itself" in line for line in rest) is is_said


@pytest.mark.parametrize(
    ("reason", "message", "log"),
    [
        pytest.param(
            "FailedBeforeReady",
            "digits-0 worker 0 ended 5 times: exited with code 3",
            "logs digits-0 -c trainer --tail=100   (as long",
            id="the first word",
        ),
        pytest.param(
            "FatalExitCode", "rank 3 in digits-1 exited with code 3", "logs digits-1 -c trainer", id="further on"
        ),
        pytest.param(
            "FailedBeforeReady",
            "digits-rendezvous-1, my-digits-2 and digits-3.txt: see digits-12: it ends",
            "logs digits-12 -c trainer",
            id="names alike",
        ),
        pytest.param(
            "StartupTimeout",
            "nothing was ready within 600 s",
            "logs -l unbroken.dev/job=digits,unbroken.dev/component=trainer --prefix -c trainer --tail=100",
            id="no pod",
        ),
        pytest.param(
            "FailedBeforeReady", "digits-" + "1" * 1_000_000, "logs -l unbroken.dev/job=digits", id="an endless number"
        ),
    ],
)
def test_why_of_a_job_that_failed_without_a_recovered_fault_leads_to_the_log_of_its_pod(
    reason: str, message: str, log: str
) -> None:
    status = running(state="Failed", history=[], conditions=[condition("Failed", "True", reason, message)])
    head, *rest = faultless_lines(job_of(status), NOW)
    assert head == f"digits in namespace team-a: FAILED: {message}"
    assert rest[0] == "  last fault none recovered: the job failed as said above"
    assert any(f"kubectl -n team-a {log}" in line for line in rest), rest
    earlier = job_of(status | {"history": [record(1)]})
    assert any(f"kubectl -n team-a {log}" in line for line in status_lines(earlier, NOW)), "not that of a repaired one"


@pytest.mark.parametrize("status", ["False", "True", "Unknown"])
def test_why_says_what_is_broken_now_whatever_the_fault_was(status: str) -> None:
    found = condition("NodesHealthy", status, "DevicesFaulty", "digits-3: preflight-matmul on cuda:0 is fatal")
    wanted = ["  nodes      digits-3: preflight-matmul on cuda:0 is fatal"] if status == "False" else []
    faultless, faulty = (job_of(running(history=history, conditions=[found])) for history in ([], [record(1)]))
    for lines in (faultless_lines(faultless, NOW), why_lines(faulty, faulty.faults[0], NOW)):
        assert [line for line in lines if "preflight" in line and line.startswith("  nodes")] == wanted


def test_why_of_a_job_without_a_fault_says_first_that_nobody_knows() -> None:
    job = replace(job_of(running(history=[])), stale=why_stale(LEASE, None, ""))
    head, *rest = faultless_lines(job, NOW)
    assert head.startswith("digits in namespace team-a: UNKNOWN: no operator keeps this up to date")
    assert rest[:2] == ["  it said    Running: 8 ranks train", "  last fault none"]
    assert rest[2].startswith("  next       bring the operator back")


def test_a_field_to_change_is_told_with_the_option_of_a_job_that_may_have_no_spec() -> None:
    asked = replace(job_of(running(history=[record(1, cause="soft-timeout")])), namespace="")
    words = "if steps may take this long, raise timeouts.softSeconds"
    told = f"{words} (unbroken run: --soft-timeout); else find where rank 3 stood still"
    for lines in (status_lines(asked, NOW), why_lines(asked, asked.faults[0], NOW)):
        assert [line.partition("next")[2].strip() for line in lines if words in line] == [told]
    lines = status_lines(replace(asked, namespace="ml"), NOW)
    assert any(f"{words}; else" in line for line in lines), "a job of a cluster has a spec"


def test_the_options_that_advice_names_are_those_of_unbroken_run() -> None:
    for field, option in _OPTIONS.items():
        assert in_flags(field.removeprefix("spec.")) == option


def test_a_job_that_never_started_has_no_iteration() -> None:
    status = running(state="Forming", history=[], conditions=[])
    del status["iteration"]
    head, row = list_lines([job_of(status)])
    assert row[head.index("ITERATION") :].split()[0] == "-"


def recovery(iteration: int) -> Recovery:
    """Return one that led to the next iteration."""
    when = "2026-01-01T00:02:00Z"
    return Recovery(
        1,
        Cause.EXCEPTION,
        Rung.IN_PROCESS,
        3,
        "digits-1",
        "node-a",
        "",
        "",
        iteration,
        iteration + 1,
        (),
        {},
        when,
        when,
    )


@pytest.mark.parametrize(
    ("term", "iteration", "recoveries", "is_forgotten"),
    [
        (1, 3, (), False),
        (2, 0, (), False),
        (2, 3, (), True),
        (2, 1, (recovery(0),), False),
        (2, 4, (recovery(3),), True),
    ],
)
def test_a_rendezvous_that_was_started_again_says_what_it_does_not_know(
    term: int, iteration: int, recoveries: tuple[Recovery, ...], *, is_forgotten: bool
) -> None:
    phase = JobPhase.RUNNING
    job = job_from_status(
        JobStatus(
            1, "digits", term, 1, phase, Reason.TRAINING, "", iteration, 8, 0, 0, (), {}, {}, recoveries, -1, None
        )
    )
    before = "the rendezvous was started again, in iteration 3, and does not know what was before"
    assert job.forgotten == (before if is_forgotten else "")
    if is_forgotten:
        assert timeline_lines(job)[1] == f"  before: {before}"
    if recoveries:
        assert why_lines(job, job.faults[0], NOW)[4] == "  detail     none was told"
        return
    assert f"  last fault none{f' that is known: {before}' if is_forgotten else ''}" in status_lines(job, NOW)
    assert timeline_lines(job)[-1] == ("  nothing happened since" if is_forgotten else "  nothing happened yet")
    with pytest.raises(InputError, match="numbers none" + (rf" \({before}\)" if is_forgotten else "; got")):
        find_fault(job, "1")
