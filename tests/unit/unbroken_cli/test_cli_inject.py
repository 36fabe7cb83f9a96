"""Whom `unbroken inject` hits, how, and that it does nothing by accident."""

import signal
from typing import Any

import pytest

from unbroken_cli.commands import inject
from unbroken_cli.errors import CommandError, refusal_hint
from unbroken_cli.injection import (
    KINDS,
    Selection,
    check_consent,
    check_state,
    choose_running,
    choose_victim,
    choose_victims,
    exec_arguments,
    find_rank,
    make_order,
)
from unbroken_cli.job import JobRecord
from unbroken_core.pod.fault_orders import FaultOrder, read_order
from unbroken_core.protocol.messages import PodStatus
from unbroken_core.vocabulary.errors import InputError
from unbroken_core.vocabulary.reasons import Role, WorkerPhase

from .test_cli_text import condition, job_of, running

JsonObject = dict[str, Any]


def a_pod(name: str, role: str = "active", phase: str = "Running") -> JsonObject:
    """Return a pod as the operator makes it."""
    container = {"name": "trainer", "command": ["python3.12", "-m", "unbroken.launch", "--", "python3.12", "t.py"]}
    return {
        "metadata": {"name": name, "uid": f"uid-of-{name}", "labels": {"unbroken.dev/role": role}},
        "spec": {"nodeName": "node-a", "containers": [container, {"name": "other"}]},
        "status": {"phase": phase},
    }


PODS = [a_pod("digits-2"), a_pod("digits-10"), a_pod("digits-11", "spare"), a_pod("digits-12", phase="Pending")]


def test_the_last_active_pod_that_runs_is_hit_unless_another_is_named() -> None:
    assert choose_victim(KINDS["kill"], PODS, None).pod == "digits-10"
    assert choose_victim(KINDS["delete-pod"], PODS, "digits-11").uid == "uid-of-digits-11"
    rendezvous = [a_pod("digits-rendezvous-0", role="")]
    assert choose_victim(KINDS["lose-rendezvous"], rendezvous, None).pod == "digits-rendezvous-0"


@pytest.mark.parametrize(
    ("pods", "wanted", "message"),
    [
        (
            PODS[2:],
            None,
            "needs an active trainer pod that runs; found digits-11 (spare Running), digits-12 (active Pend",
        ),
        (PODS, "digits-12", "needs pod 'digits-12' to run; found"),
        (PODS, "others-0", "needs pod 'others-0' to run; found"),
        ([], None, "needs an active trainer pod that runs; found none"),
        (
            [PODS[0] | {"metadata": PODS[0]["metadata"] | {"deletionTimestamp": "x"}}],
            None,
            "found digits-2 (active end",
        ),
    ],
)
def test_a_victim_that_is_not_there_is_refused_with_those_that_are(
    pods: list[JsonObject], wanted: str | None, message: str
) -> None:
    with pytest.raises(InputError) as error:
        choose_victim(KINDS["kill"], pods, wanted)
    assert message in str(error.value)


def test_a_worker_is_reached_by_the_interpreter_of_its_own_container() -> None:
    words = exec_arguments(KINDS["hang"], choose_victim(KINDS["hang"], PODS, None), 1)
    assert words[:6] == ["exec", "digits-10", "--container", "trainer", "--", "python3.12"]
    assert words[-2:] == [str(int(signal.SIGSTOP)), "1"]


def placed(name: str, role: str, node: str, rack: str) -> JsonObject:
    """Return a pod with its place."""
    pod = a_pod(name, role)
    pod["spec"]["nodeName"] = node
    pod["metadata"]["annotations"] = {"unbroken.dev/topology": f'{{"rack": "{rack}"}}'}
    return pod


PLACED = [
    placed("digits-0", "active", "node-a", "r1"),
    placed("digits-1", "active", "node-b", "r1"),
    placed("digits-2", "spare", "node-b", "r1"),
    placed("digits-3", "active", "node-c", "r2"),
]


def test_a_node_or_a_domain_is_hit_as_a_whole_and_a_fault_of_workers_there_passes_spares_by() -> None:
    def chosen(kind: str, **wanted: Any) -> list[str]:
        return [victim.pod for victim in choose_victims(KINDS[kind], PLACED, Selection(**wanted))]

    assert chosen("lose-pod", domain="r1") == ["digits-0", "digits-1", "digits-2"]
    assert chosen("exception", domain="r1") == ["digits-0", "digits-1"]
    assert chosen("lose-pod", node="node-b") == ["digits-1", "digits-2"]
    with pytest.raises(InputError, match=r"needs an active trainer pod that runs in domain 'r9'; found digits-0"):
        chosen("kill", domain="r9")


def a_status(name: str, node: str, ranks: tuple[int, ...], num_workers: int = 2, rack: str = "r1") -> PodStatus:
    """Return a pod as its rendezvous tells it."""
    role = Role.ACTIVE if ranks else Role.SPARE
    return PodStatus(name, f"uid-of-{name}", node, role, ranks, (rack,), (WorkerPhase.RUNNING,) * num_workers, True)


STATUS = [
    a_status("d-0", "a", (0, 1)),
    a_status("d-1", "b", (2, 3)),
    a_status("d-2", "b", ()),
    a_status("d-3", "c", (4,)),
]


def test_a_rank_is_found_with_its_worker_and_not_guessed() -> None:
    assert find_rank(3, STATUS) == Selection(pod="d-1", local_rank=1)
    with pytest.raises(InputError, match="pod d-3 has 1 ranks on 2 workers, so that nobody knows which"):
        find_rank(4, STATUS)
    with pytest.raises(InputError, match="--rank 9: want one of 0 to 4"):
        find_rank(9, STATUS)
    with pytest.raises(InputError, match="want one of none: no pod has ranks"):
        find_rank(0, [])


def test_pods_of_a_run_are_chosen_as_those_of_a_cluster() -> None:
    def chosen(kind: str, **wanted: Any) -> list[str]:
        return [pod.pod for pod in choose_running(KINDS[kind], STATUS, Selection(**wanted))]

    assert chosen("kill") == ["d-3"]
    assert chosen("kill", node="b") == ["d-1"]
    assert chosen("lose-pod", node="b") == ["d-1", "d-2"]
    assert chosen("kill", domain="r1") == ["d-0", "d-1", "d-3"]
    with pytest.raises(InputError, match=r"--fault kill: needs node 'z' that is connected; the job has d-0, d-1"):
        chosen("kill", node="z")
    with pytest.raises(InputError, match=r"the job has d-0, d-1, .* in domains r1$"):
        chosen("kill", domain="r9")


def test_an_order_goes_to_the_module_of_the_pods_own_release() -> None:
    order = make_order(KINDS["exit"], "0123456789abcdef", 5, {"code": 3, "seconds": None})
    assert order == FaultOrder(id="0123456789abcdef", kind="exit", rank=5, code=3)
    words = exec_arguments(KINDS["exit"], choose_victim(KINDS["exit"], PODS, None), 1, order)
    assert words[4:8] == ["--", "python3.12", "-m", "unbroken.faults"]
    assert (read_order(words[8]), words[9]) == (order, "1")
    assert make_order(KINDS["kill"], "0123456789abcdef", None, {"code": None}) is None
    with pytest.raises(InputError, match="--code: --fault kill takes nothing more"):
        make_order(KINDS["kill"], "0123456789abcdef", None, {"code": 3})


def test_an_option_that_a_fault_needs_or_cannot_use_is_named() -> None:
    identity = "0123456789abcdef"
    with pytest.raises(InputError, match=r"^--fault check: needs --check$"):
        make_order(KINDS["check"], identity, None, {"check": None})
    with pytest.raises(InputError, match=r"^--fault disk-full: needs --path and --max-bytes$"):
        make_order(KINDS["disk-full"], identity, None, {"path": None})
    arguments = inject.parser().parse_args(["job", "--fault", "check", "--check", "a", "--local-rank", "1", "--yes"])
    with pytest.raises(InputError, match=r"^--local-rank: check hits no single worker$"):
        inject._show(arguments)


def test_a_pod_with_the_network_of_its_node_is_not_cut_off() -> None:
    pod = a_pod("digits-0")
    pod["spec"]["hostNetwork"] = True
    with pytest.raises(InputError, match="pod digits-0 has the network of its node; nothing was done"):
        choose_victim(KINDS["partition"], [pod], None)
    assert choose_victim(KINDS["kill"], [pod], None).pod == "digits-0"


def test_nothing_is_broken_without_a_word_of_the_user_or_the_owner() -> None:
    job: JsonObject = {"metadata": {"name": "digits", "namespace": "ml"}}
    with pytest.raises(
        InputError, match=r"it would hit pod digits-0; nothing was done\. Add --yes, or let everybody break this job"
    ):
        check_consent(job, False, "hit pod digits-0")
    check_consent(job, True, "")
    job["metadata"]["annotations"] = {"unbroken.dev/allow-faults": "true"}
    check_consent(job, False, "")
    job["metadata"]["annotations"] = {"unbroken.dev/allow-faults": "false"}
    with pytest.raises(InputError):
        check_consent(job, False, "")


@pytest.mark.parametrize("state", ["Forming", "Recovering", "Complete", None])
def test_a_job_that_does_not_train_is_left_alone(state: str | None) -> None:
    with pytest.raises(InputError, match=f"must be Running, is {state or 'none'}"):
        check_state({"metadata": {"name": "digits"}, "status": {"state": state}})
    check_state({"metadata": {"name": "digits"}, "status": {"state": "Running"}})


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        pytest.param(
            'Error from server (Forbidden): pods "digits-0" is forbidden: User "jo" cannot create resource "pods/exec"',
            "you need the right to create pods/exec",
            id="rights",
        ),
        pytest.param(
            "error: unable to upgrade connection: the server could not find the requested resource",
            "this API server does not serve pods/exec, as that of `unbroken local` does not: delete a pod",
            id="the cluster on a laptop",
        ),
        pytest.param("command terminated with exit code 126", "or the pod lacks Python", id="another reason"),
    ],
)
def test_who_cannot_reach_into_a_pod_is_told_why_by_what_kubectl_says(said: str, hint: str) -> None:
    assert hint in refusal_hint(said, "pods/exec", "delete a pod")


def state_of(state: str, message: str) -> JobRecord:
    """Return a job in this state."""
    kind = "Failed" if state == "Failed" else "Running"
    return job_of(running(state=state, conditions=[condition(kind, str(kind == state), "F", message)]))


@pytest.mark.parametrize(
    ("answers", "wanted"),
    [
        ([InputError("no file token")], "kill: worker 0; then the job ended, or is another one by now: no file token"),
        (
            [CommandError("refused"), CommandError("refused")],
            "kill: worker 0; whether the job recovered is not known: refused",
        ),
        (
            [
                CommandError("refused"),
                state_of("Failed", "too many faults"),
            ],
            "kill: worker 0; digits in namespace team-a: no recovery, state Failed: too many faults",
        ),
        (
            [state_of("Recovering", "forming")] * 2,
            "kill: worker 0; digits in namespace team-a: no recovery within 5 s, state Recovering: forming",
        ),
    ],
)
def test_who_waits_in_vain_is_told_what_was_hit(
    answers: list[JobRecord | Exception], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 1.0, 6.0, 6.0])
    monkeypatch.setattr("unbroken_cli.commands.inject.time.monotonic", lambda: next(clock))
    monkeypatch.setattr("unbroken_cli.commands.inject.time.sleep", lambda _seconds: None)
    left = iter(answers)

    def look() -> JobRecord:
        answer = next(left)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(CommandError) as raised:
        inject._wait_for_recovery(look, job_of(running()), "kill: worker 0", 5.0)
    assert str(raised.value) == wanted
