"""What the operator remembers, and the stores and settings of the shell that need no I/O."""

from typing import Any

import pytest
from tests.unit.unbroken_operator.operator_world import World, a_node, a_recovery

from unbroken_core.protocol.messages import JobStatus, RungUse
from unbroken_core.vocabulary.errors import InputError
from unbroken_core.vocabulary.reasons import Cause, JobPhase, Rung
from unbroken_operator.adapters.listening import Address
from unbroken_operator.adapters.stores import MAX_HOSTED_JOBS, MAX_PAST_HOSTS, NodeStore, PodStore
from unbroken_operator.api import layout
from unbroken_operator.config import parse
from unbroken_operator.decisions.limits.retry import retry_delay_s
from unbroken_operator.decisions.memory import MAX_POSTED, REVERTS_S, JobMemory
from unbroken_operator.decisions.snapshot import PodView, WriteRefusal, pod_view


def a_pod(name: str = "digits-0", version: int = 1, uid: str = "u0", **status: Any) -> dict[str, Any]:
    """Return a pod of job digits."""
    labels = {"unbroken.dev/job": "digits", "unbroken.dev/component": "trainer"}
    metadata = {"name": name, "namespace": "ml", "uid": uid, "resourceVersion": str(version), "labels": labels}
    return {"metadata": metadata, "status": {"phase": "Running", **status}}


def failed(*uids: str) -> list[PodView]:
    """Return failed pods."""
    return [pod_view(a_pod(uid, uid=uid, phase="Failed")) for uid in uids]


def test_pods_that_fail_together_count_once_and_later_ones_again() -> None:
    memory = JobMemory()
    memory.update([], None, is_over=False, now_s=100.0)
    memory.update(failed("a", "b", "c"), None, is_over=False, now_s=101.0)
    assert memory.num_early_failures == 1
    memory.update(failed("a", "b", "c", "d"), None, is_over=False, now_s=102.0)
    assert memory.num_early_failures == 1
    memory.update(failed("a", "b", "c", "d", "e"), None, is_over=False, now_s=104.0)
    assert memory.num_early_failures == 2


def test_pods_that_failed_before_the_operator_started_do_not_count() -> None:
    memory = JobMemory()
    memory.update(failed("a"), None, is_over=False, now_s=100.0)
    assert memory.num_early_failures == 0


def test_recoveries_that_end_while_the_operator_looks_are_remembered_with_their_age() -> None:
    """A rendezvous that is made later counts them in its budgets; what had ended before has an unknown age."""

    def report(*recoveries: Any, term: int = 1) -> JobStatus:
        world = World()
        world.settle()
        world.run_pods()
        world.rendezvous_says(JobPhase.RUNNING, ["digits-0"], [], recoveries=recoveries, term=term)
        assert world.report is not None
        return world.report

    memory = JobMemory()
    memory.update([], None, is_over=False, now_s=100.0)
    memory.update([], report(a_recovery(1)), is_over=False, now_s=101.0)
    pod = a_recovery(2, rung=Rung.POD, ended_at="")
    memory.update([], report(a_recovery(1), pod), is_over=False, now_s=110.0)
    assert memory.view(110.0).uses == ()
    memory.update([], report(a_recovery(1), a_recovery(2, rung=Rung.WORLD)), is_over=False, now_s=120.0)
    memory.update([], report(a_recovery(1), term=2), is_over=False, now_s=150.0)
    memory.update([], None, is_over=False, now_s=155.0)
    uses = (RungUse(Rung.WORLD, 40.0), RungUse(Rung.IN_PROCESS, 10.0))
    assert memory.view(160.0).uses == tuple((Cause.EXCEPTION, use) for use in uses)


def test_attempts_get_slower_up_to_five_minutes() -> None:
    assert [retry_delay_s(number) for number in range(7)] == [0.0, 2.0, 8.0, 32.0, 128.0, 300.0, 300.0]


def test_a_refusal_is_remembered_until_a_round_without() -> None:
    memory = JobMemory()
    memory.refuse((WriteRefusal("p", "quota"),), 1.0)
    memory.refuse((WriteRefusal("p", "quota"),), 5.0)
    view = memory.view(8.0)
    assert (view.num_refused_rounds, view.since_refusal_s) == (2, 3.0)
    memory.refuse((), 9.0)
    assert memory.view(9.0).refusals == ()


def test_an_older_state_of_a_pod_does_not_replace_a_newer_one() -> None:
    changed: list[Any] = []
    store = PodStore(changed.append)
    store.upsert(a_pod(version=5))
    store.upsert(a_pod(version=4, phase="Pending"))
    assert [pod.phase for pod in store.of_job(("ml", "digits"))] == ["Running"]
    assert changed == [("ml", "digits")]


def test_a_deleted_pod_does_not_come_back_by_a_late_answer() -> None:
    store = PodStore(lambda _: None)
    store.upsert(a_pod(version=5))
    store.remove(a_pod(version=7))
    store.upsert(a_pod(version=6))
    assert store.of_job(("ml", "digits")) == ()


def test_a_pod_that_bears_the_label_of_its_job_again_is_seen_again() -> None:
    """The watch tells alike of a pod that is gone and of one without the label; a later version shows that it lives."""
    key, store = ("ml", "digits"), PodStore(lambda _: None)
    store.upsert(a_pod(version=5))
    store.remove(a_pod(version=6))
    assert [pod.name for pod in store.vanished(key)] == ["digits-0"]
    store.explain(key, "digits-0")
    assert store.vanished(key) == ()
    store.upsert(a_pod(version=8))
    assert [pod.name for pod in store.of_job(key)] == ["digits-0"]
    store.forget(key, "digits-0", "u0")
    store.upsert(a_pod(version=9))
    assert store.of_job(key) == ()


def test_a_pod_that_was_told_to_end_has_not_vanished() -> None:
    store = PodStore(lambda _: None)
    pod = a_pod(version=5)
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    store.upsert(pod)
    store.remove(pod)
    assert store.vanished(("ml", "digits")) == ()


def test_what_was_set_back_is_remembered_for_a_while_only() -> None:
    memory = JobMemory()
    memory.note_revert("service", 0.0)
    memory.note_revert("service", 10.0)
    assert memory.view(15.0).reverts == {"service": (2, 5.0)}
    assert memory.view(10.0 + REVERTS_S + 1).reverts == {}
    memory.note_revert("service", 10.0 + REVERTS_S + 1)
    assert memory.view(10.0 + REVERTS_S + 1).reverts == {"service": (1, 0.0)}


def test_only_the_latest_events_are_remembered() -> None:
    memory = JobMemory()
    for number in range(MAX_POSTED + 1):
        memory.note_posted(f"event-{number}")
    assert len(memory.view(0.0).posted) == MAX_POSTED
    assert "event-0" not in memory.view(0.0).posted


def test_a_new_list_drops_what_is_gone_and_keeps_what_is_newer_than_the_list() -> None:
    changed: list[Any] = []
    store = PodStore(changed.append)
    store.upsert(a_pod("digits-0", version=5, uid="old"))
    store.upsert(a_pod("digits-1", version=12, uid="own write"))
    store.replace([store.read(a_pod("digits-2", version=3, uid="listed"))], "10")
    assert [pod.uid for pod in store.of_job(("ml", "digits"))] == ["own write", "listed"]


def test_only_labels_and_readiness_of_a_node_are_news() -> None:
    changed: list[str] = []
    store = NodeStore(changed.append)
    store.upsert(a_node("a", rack="r1"))
    store.upsert({**a_node("a", rack="r1"), "spec": {"podCIDR": "x"}})
    store.upsert(a_node("a", is_ready=False, rack="r1"))
    store.replace([], "9")
    assert changed == ["a", "a", "a"]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        pytest.param(["--namespace", "A_b"], "--namespace: not the name of a namespace: 'A_b'", id="namespace"),
        pytest.param(["--metrics-listen", "9090"], "--metrics-listen: must be ADDRESS:PORT", id="address"),
        pytest.param(["--liveness", "a:99999"], "--liveness: must be ADDRESS:PORT", id="port"),
        pytest.param(["--force-delete-after-seconds", "nan"], "must be at least 0, got nan", id="not a number"),
        pytest.param(["--sidecar-image", ""], "--sidecar-image: must not be empty", id="image"),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(
    arguments: list[str], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "kubernetes")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    scope = [] if "--namespace" in arguments else ["--all-namespaces"]
    with pytest.raises(InputError) as raised:
        parse([*scope, *arguments])
    assert part in str(raised.value)


def test_an_ipv6_address_is_read_without_its_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "kubernetes")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    config = parse(["--all-namespaces", "--metrics-listen", "[::]:9090"])
    assert config.metrics_listen == Address("::", 9090)


def test_nodes_on_which_a_job_ran_are_remembered_and_bounded() -> None:
    store, key = PodStore(lambda _: None), ("ml", "digits")
    for number in range(300):
        item = hosted_pod(f"node-{number}", version=str(number + 1))
        store.upsert(item)
        if number < 299:
            store.remove(item)
    assert store.hosts(key, "uid-of-job") == {f"node-{number}" for number in range(300 - MAX_PAST_HOSTS, 300)}
    assert store.hosts(key, "uid-of-another") == frozenset()
    store.upsert(hosted_pod("claimed", version="999", phase="Pending"))
    assert "claimed" not in store.hosts(key, "uid-of-job"), "no kubelet has taken it up"
    for number in range(MAX_HOSTED_JOBS):
        store.upsert(hosted_pod("x", version=str(1000 + number), owner=f"job-{number}"))
    assert store.hosts(("ml", "gone"), "uid-of-job") == frozenset()


def hosted_pod(node: str, version: str, phase: str = "Running", owner: str = "uid-of-job") -> dict[str, Any]:
    """Return a pod of a job on a node."""
    return {
        "metadata": {
            "name": "digits-0",
            "namespace": "ml",
            "uid": f"pod-{version}",
            "resourceVersion": version,
            "labels": {layout.JOB_LABEL: "digits"},
            "ownerReferences": [{"uid": owner, "controller": True}],
        },
        "spec": {"nodeName": node},
        "status": {"phase": phase},
    }
