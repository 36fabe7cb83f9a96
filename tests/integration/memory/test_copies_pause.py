"""Copies between keepers rest while all ranks restart, and at other times leave the processors to whoever trains."""

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from tests.waiting import LIMIT_S, wait_until

from unbroken.keeper import fetching
from unbroken.keeper.copies import Receiving
from unbroken.keeper.copy_sender import CopySender
from unbroken.keeper.counting import Counting
from unbroken.keeper.digests import read_slot_head
from unbroken.keeper.peer_link import PAUSE_S, STALL_S, Link, LinkError, Pause, connect
from unbroken.keeper.replication import Replication
from unbroken.keeper.telling import Telling
from unbroken_core.pod.memory_messages import Fetched, FetchShard, NotFetched, Restarting, Unranked
from unbroken_core.pod.memory_slots import CONTENT_OFFSET, Moment, SlotState
from unbroken_core.protocol.messages import Buddies

from .copying import CopyPod, make_pods

LONG_S = 300.0


class SeenPause(Pause):
    """A pause that says who waits for its end."""

    num_waits = 0

    def wait(self) -> None:
        """Count it."""
        self.num_waits += 1
        super().wait()


@pytest.fixture
def pair() -> Iterator[tuple[CopyPod, CopyPod]]:
    owner, holder = made = make_pods("owner", "holder", limit_bytes=256 << 20)
    holder.copies.keep_for([owner.uid])
    yield owner, holder
    for pod in made:
        pod.close()
        shutil.rmtree(pod.root)


def sender_to(owner: CopyPod, holder: CopyPod, pause: Pause) -> CopySender:
    sender = CopySender(holder.peer, owner.identity.client_context(), owner.arena, ranks_per_pod=2, pause=pause)
    owner.senders.append(sender)
    return sender


def has_kept(sender: CopySender, step: int) -> bool:
    return 0 in sender.progress and sender.progress[0].kept == Moment(1, 0, step)


def is_empty(holder: CopyPod) -> bool:
    """Return whether the holder has begun with a copy, and has nothing of it."""
    (path,) = [path for path in holder.arena.copy_slots() if (head := read_slot_head(path)) and head.serial]
    head = read_slot_head(path)
    assert head is not None
    return head.state is SlotState.WRITING and not any(path.read_bytes()[CONTENT_OFFSET:])


@pytest.mark.parametrize("is_holder", [False, True])
def test_a_copy_rests_while_ranks_restart_and_goes_on_once_they_have_restored(
    pair: tuple[CopyPod, CopyPod], is_holder: bool
) -> None:
    owner, holder = pair
    pause = SeenPause(LONG_S)
    pause.begin(0)
    holder.server._pause = pause if is_holder else None
    sender = sender_to(owner, holder, Pause() if is_holder else pause)
    content = owner.save(1)
    sender.start()
    wait_until(lambda: pause.num_waits, "somebody who rests")
    assert is_empty(holder)
    assert sender.progress == {}
    pause.end(0)
    assert pause._until_s > 0, "in the iteration that is over nobody restores any more"
    pause.end(1)
    wait_until(lambda: sender.progress, "a copy")
    assert sender.progress[0].kept == Moment(1, 0, 1)
    assert holder.copied() == {(0, 1, 0): content}


def test_a_pause_ends_by_itself_before_the_other_side_gives_the_connection_up(pair: tuple[CopyPod, CopyPod]) -> None:
    assert 2 * PAUSE_S < STALL_S
    owner, holder = pair
    pause = Pause(0.01)
    pause.begin(0)
    sender = sender_to(owner, holder, pause)
    content = owner.save(1)
    sender.start()
    wait_until(lambda: sender.progress, "a copy")
    assert holder.copied() == {(0, 1, 0): content}


def test_what_is_said_again_or_late_begins_no_pause() -> None:
    pause = Pause(LONG_S)
    pause.begin(3)
    pause.end(4)
    for iteration in (3, 2, 3):
        pause.begin(iteration)
        pause.wait()
    # A worker was faster than the agent.
    pause.end(6)
    pause.begin(5)
    pause.wait()


def test_a_keeper_goes_on_once_no_worker_of_its_pod_will_restore(pair: tuple[CopyPod, CopyPod]) -> None:
    owner, _holder = pair
    replication = Replication(owner.arena._config, owner.arena, Telling(owner.arena, owner.root), Counting(1 << 20))
    replication.pause._limit_s = LONG_S
    for iteration in (3, 4):
        replication.obey(Restarting(iteration), lambda _request: None)
        assert replication.pause._until_s > 0
        replication.obey(Unranked(iteration + 1), lambda _request: None)
        replication.pause.wait()


def test_a_holder_stands_back_while_it_receives_and_only_then(
    pair: tuple[CopyPod, CopyPod], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it, it holds a lock for which a restore of its own pod may wait."""
    owner, holder = pair
    seen: dict[str, set[int]] = {}

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            seen.setdefault(name, set()).add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            return function(*args)

        return call

    monkeypatch.setattr(holder.copies, "begin", noting("begin", holder.copies.begin))
    monkeypatch.setattr(Receiving, "write", noting("write", Receiving.write))
    monkeypatch.setattr(Receiving, "seal", noting("seal", Receiving.seal))
    sender = sender_to(owner, holder, Pause())
    sender.start()
    for step in (1, 2):
        owner.save(step)
        wait_until(partial(has_kept, sender, step), "a copy")
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert seen == {"begin": {own}, "write": {19}, "seal": {own}}


def test_a_fetch_waits_for_a_killed_keeper_and_for_one_that_left_until_the_iteration_is_over(
    pair: tuple[CopyPod, CopyPod], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, holder = pair[1], pair[0]
    holder.save(3)
    pause, answers, refused, is_back = Pause(), list[Fetched | NotFetched](), list[int](), threading.Event()

    def refuse(*arguments: Any) -> Link:
        if is_back.is_set():
            return connect(*arguments)
        refused.append(1)
        raise LinkError("cannot connect") from ConnectionRefusedError()

    monkeypatch.setattr(fetching, "connect", refuse)
    monkeypatch.setattr(fetching, "_RESTART_S", LONG_S)
    fetcher = fetching.Fetcher(reader.arena, pause)

    def fetch(iteration: int) -> threading.Thread:
        wanted = FetchShard(holder.peer, 0, 4, 1, 0, 3, restored_in=iteration)
        context = reader.identity.client_context()
        thread = threading.Thread(target=lambda: answers.append(fetcher.fetch(wanted, context)))
        thread.start()
        return thread

    left = fetch(5)
    # Its agent says late that the iteration before is over: that is no news.
    pause.begin(4)
    seen = len(refused)
    wait_until(lambda: len(refused) > seen + 2, "attempts")
    assert answers == []
    pause.begin(5)
    left.join(LIMIT_S)
    (answer,) = answers
    assert isinstance(answer, NotFetched)
    assert "iteration 5 is over" in answer.reason
    # The next iteration asks for the same, and waits for nothing of before.
    back = fetch(6)
    seen = len(refused)
    wait_until(lambda: len(refused) > seen, "attempts")
    is_back.set()
    back.join(LIMIT_S)
    assert isinstance(answers[-1], Fetched)


def test_a_fetch_waits_for_no_pod_that_is_lost_and_for_each_that_is_not(
    pair: tuple[CopyPod, CopyPod], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen before: 5 s of a restore, where the pod that was lost had no rank and so ended no iteration."""
    reader, holder = pair[1], pair[0]
    holder.save(3)
    answers, refused, is_back = list[Fetched | NotFetched](), list[int](), threading.Event()

    def refuse(*arguments: Any) -> Link:
        if is_back.is_set():
            return connect(*arguments)
        refused.append(1)
        raise LinkError("cannot connect") from ConnectionRefusedError()

    monkeypatch.setattr(fetching, "connect", refuse)
    monkeypatch.setattr(fetching, "_RESTART_S", LONG_S)
    telling = Telling(reader.arena, reader.root)
    replication = Replication(reader.arena._config, reader.arena, telling, Counting(1 << 20))
    fetcher = fetching.Fetcher(reader.arena, replication.pause)

    def fetch() -> threading.Thread:
        wanted = FetchShard(holder.peer, 0, 4, 1, 0, 3, restored_in=5)
        context = reader.identity.client_context()
        thread = threading.Thread(target=lambda: answers.append(fetcher.fetch(wanted, context)))
        thread.start()
        return thread

    def told(*lost: str) -> None:
        replication.obey(Buddies(1, lost=lost), lambda _request: None)

    waiting = fetch()
    told("somebody")
    seen = len(refused)
    wait_until(lambda: len(refused) > seen + 2, "attempts")
    assert answers == []
    told("somebody", holder.uid)
    waiting.join(LIMIT_S)
    (answer,) = answers
    assert isinstance(answer, NotFetched)
    assert "its pod is lost" in answer.reason
    # One that answers is asked all the same, and one that is back is worth a wait again.
    is_back.set()
    fetch().join(LIMIT_S)
    assert isinstance(answers[-1], Fetched)
    is_back.clear()
    told()
    waiting = fetch()
    seen = len(refused)
    wait_until(lambda: len(refused) > seen + 2, "attempts")
    is_back.set()
    waiting.join(LIMIT_S)
    assert isinstance(answers[-1], Fetched)
