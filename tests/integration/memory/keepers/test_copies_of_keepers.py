"""Keepers of several pods, as processes: what is copied, who dies at which point, and what a new pod restores."""

import os
import re
import threading
from collections.abc import Callable, Iterator

import psutil
import pytest
from tests.waiting import wait_until

from unbroken.keeper.digests import read_slot_head
from unbroken.memory import Checkpointer, Saved
from unbroken.network.pod_certificates import PodAuthority
from unbroken_core.pod.memory_slots import COMING_NAME, CONTENT_OFFSET, PINNED_NAME
from unbroken_core.protocol.messages import Buddies
from unbroken_core.vocabulary.checkpoints import Key

from .keeper_pods import JOB, KeeperPod, assert_is, load, save, state_of, worker_of

Make = Callable[..., tuple[KeeperPod, ...]]


@pytest.fixture
def pods() -> Iterator[Make]:
    made: list[KeeperPod] = []

    def make(*uids: str, limit_bytes: int = 64 << 20) -> tuple[KeeperPod, ...]:
        fresh = tuple(
            KeeperPod(uid, f"127.0.0.{11 + len(made) + index}", limit_bytes) for index, uid in enumerate(uids)
        )
        made.extend(fresh)
        return fresh

    yield make
    for pod in made:
        pod.close()


def pair(pods: Make, **kwargs: int) -> tuple[KeeperPod, KeeperPod]:
    owner, holder = pods("owner", "holder", **kwargs)
    owner.start()
    holder.start()
    holder.tell(owners=("owner",))
    owner.tell(holder)
    return owner, holder


def test_a_pod_that_takes_over_restores_the_very_bits_of_a_lost_one(
    pods: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, holder = pair(pods)
    for saved in (3, 4):
        save(monkeypatch, owner, saved)
        holder.wait_kept(owner, saved)
    owner.close()
    (spare,) = pods("spare")
    spare.start()
    step, state = load(monkeypatch, spare, 4, holder)
    assert step == 4
    assert_is(state, 4)
    # What was fetched is given back, and what comes after it is copied in turn.
    fetched = spare.root / "spare" / "fetched"
    wait_until(lambda: not list(fetched.iterdir()), "memory that is given back")
    holder.tell(owners=("owner", "spare"))
    spare.tell(holder)
    save(monkeypatch, spare, 5, iteration=1)
    holder.wait_kept(spare, 5)
    assert holder.kept("owner") == {3, 4}
    holder.tell(owners=("spare",), drop=("owner",))
    wait_until(lambda: not holder.kept("owner"), "copies that are dropped")


def test_the_holder_itself_takes_over_without_a_network(pods: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, holder = pair(pods)
    save(monkeypatch, owner, 3)
    holder.wait_kept(owner, 3)
    owner.close()
    step, state = load(monkeypatch, holder, 3)
    assert step == 3
    assert_is(state, 3)


@pytest.mark.parametrize("point", ["offered", "half-sent", "sent", "kept"])
def test_an_owner_that_is_killed_while_it_copies_leaves_what_was_whole(
    pods: Make, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    owner, holder = pair(pods)
    save(monkeypatch, owner, 3)
    holder.wait_kept(owner, 3)
    owner.kill()
    owner.start(point)
    save(monkeypatch, owner, 4)
    owner.wait_dead()
    # It was killed with its host: what can be read is one step, and whole.
    (spare,) = pods("spare")
    spare.start()
    step, state = load(monkeypatch, spare, 3, holder)
    assert step == 3
    assert_is(state, 3)
    # It was killed alone: the next keeper copies what is missing.
    owner.start()
    holder.wait_kept(owner, 4)
    step, state = load(monkeypatch, spare, 4, holder, iteration=2)
    assert step == 4
    assert_is(state, 4)


def test_a_buddy_that_changes_in_mid_copy_keeps_what_it_has_until_the_next_one_has_more(
    pods: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, holder = pair(pods)
    save(monkeypatch, owner, 3)
    holder.wait_kept(owner, 3)
    holder.kill()
    holder.start("stopped")
    holder.wait_kept(owner, 3)
    save(monkeypatch, owner, 4)
    assert holder.keeper is not None
    keeper = psutil.Process(holder.keeper.pid)
    wait_until(lambda: keeper.status() == psutil.STATUS_STOPPED, "a holder that has half of a copy")
    (following,) = pods("following")
    following.start()
    following.tell(owners=("owner",))
    owner.tell(following)
    following.wait_kept(owner, 4)
    assert following.kept("owner") == {4}
    # It stops after each block from now on.
    letting_go = threading.Event()

    def let_go() -> None:
        while not letting_go.wait(0.01):
            keeper.resume()

    thread = threading.Thread(target=let_go)
    thread.start()
    try:
        # What was on its way to it is whole there as well by now, or void; what it had is whole.
        (spare,) = pods("spare")
        spare.start()
        for iteration, step, kept_by in ((1, 3, holder), (2, 4, following)):
            found, state = load(monkeypatch, spare, step, kept_by, iteration=iteration)
            assert found == step
            assert_is(state, step)
        assert 3 in holder.kept("owner")
        holder.tell(drop=("owner",))
        wait_until(lambda: not holder.kept("owner"), "copies that are dropped")
    finally:
        letting_go.set()
        thread.join()


@pytest.mark.parametrize("point", ["wanted", "half-written", "verified", "half-sealed", "sealed"])
def test_a_holder_that_is_killed_while_it_takes_a_copy_tells_of_whole_ones_alone(
    pods: Make, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    owner, holder = pair(pods)
    save(monkeypatch, owner, 3)
    holder.wait_kept(owner, 3)
    holder.kill()
    holder.start(point)
    save(monkeypatch, owner, 4)
    holder.wait_dead()
    owner.kill()
    holder.start()
    wait_until(lambda: holder.kept("owner"), "copies that are told again")
    told = holder.kept("owner")
    assert told == ({3, 4} if point == "sealed" else {3})
    (spare,) = pods("spare")
    spare.start()
    step, state = load(monkeypatch, spare, max(told), holder)
    assert step == max(told)
    assert_is(state, max(told))
    owner.start()
    holder.wait_kept(owner, 4)


def test_a_holder_that_is_killed_while_it_hands_out_is_followed_by_the_next_one(
    pods: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, holder = pair(pods)
    save(monkeypatch, owner, 3)
    holder.wait_kept(owner, 3)
    holder.kill()
    holder.start("half-handed-out")
    holder.wait_reachable()
    (spare,) = pods("spare")
    spare.start()
    step, state = load(monkeypatch, spare, 3, holder, owner)
    assert step == 3
    assert_is(state, 3)
    holder.wait_dead()


@pytest.mark.parametrize("point", ["unwritten", "half-fetched"])
def test_a_reader_that_is_killed_while_it_fetches_fetches_again(
    pods: Make, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    owner, holder = pair(pods)
    save(monkeypatch, owner, 3)
    holder.wait_kept(owner, 3)
    (spare,) = pods("spare")
    spare.start(point)

    def restart() -> None:
        spare.wait_dead()
        spare.start()

    restarting = threading.Thread(target=restart)
    restarting.start()
    step, state = load(monkeypatch, spare, 3, holder)
    restarting.join()
    # What it had mapped is not what the new keeper fills: it says so, and no bit of it is used.
    if step is None:
        step, state = load(monkeypatch, spare, 3, holder, iteration=2)
    assert step == 3
    assert_is(state, 3)


def test_nobody_left_means_no_checkpoint_and_says_whom_it_asked(
    pods: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owner, holder = pair(pods)
    save(monkeypatch, owner, 3)
    holder.wait_kept(owner, 3)
    owner.kill()
    holder.kill()
    (spare,) = pods("spare")
    spare.start()
    step, _ = load(monkeypatch, spare, 3, holder, owner)
    assert step is None
    assert "pod holder: cannot connect" in caplog.text
    assert "pod owner: cannot connect" in caplog.text


def flip(pod: KeeperPod, step: int, offset: int) -> None:
    """Flip a bit in the copy of a step that this pod has."""
    copies = (pod.root / pod.uid / "copies").glob("*.slot")
    (copy,) = (path for path in copies if (head := read_slot_head(path)) is not None and head.moment.step == step)
    with copy.open("r+b") as file:
        file.seek(CONTENT_OFFSET + offset)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 8]))


@pytest.mark.parametrize("offset", [100, 3_000_000])
def test_a_holder_of_a_copy_that_is_spoilt_is_asked_for_the_one_before_it(
    pods: Make, monkeypatch: pytest.MonkeyPatch, offset: int
) -> None:
    """Before, nothing more was asked of it, and where nobody else had the older one, all ranks began anew."""
    owner, holder = pair(pods)
    for saved in (3, 4):
        save(monkeypatch, owner, saved)
        holder.wait_kept(owner, saved)
    flip(holder, 4, offset)
    (spare,) = pods("spare")
    spare.start()
    step, state = load(monkeypatch, spare, 4, holder, older=3)
    assert step == 3
    assert_is(state, 3)


def test_a_bit_that_flips_in_a_copy_is_never_restored(
    pods: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owner, holder = pair(pods)
    save(monkeypatch, owner, 3)
    holder.wait_kept(owner, 3)
    flip(holder, 3, 3_000_000)
    (spare,) = pods("spare")
    spare.start()
    step, _ = load(monkeypatch, spare, 3, holder)
    assert step is None
    assert "differs from what its owner digested" in caplog.text
    wait_until(lambda: spare.counted.digest_failures == 1, "a counted block that differs", describe=spare.errors)
    # The owner still has the right one.
    step, state = load(monkeypatch, spare, 3, holder, owner, iteration=2)
    assert step == 3
    assert_is(state, 3)


def test_a_limit_without_room_for_copies_says_so_and_harms_no_save(pods: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, holder = pair(pods, limit_bytes=10 << 20)
    save(monkeypatch, holder, 3, rank=1, world_size=2)
    save(monkeypatch, owner, 3, world_size=2)
    problem = wait_until(lambda: dict(owner.held.problems).get("holder"), "a problem that is told")
    assert problem.startswith("no room: its slots have ")
    save(monkeypatch, owner, 4, world_size=2)
    save(monkeypatch, holder, 4, rank=1, world_size=2)
    assert holder.kept("owner") == set()


def test_a_limit_that_is_too_small_is_told_with_room_for_copies(pods: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, _ = pods("owner", "holder", limit_bytes=4 << 20)
    owner.start()
    owner.wait_reachable()
    with worker_of(monkeypatch, owner):
        problem = Checkpointer().reserve(state_of(1))
    needed = int(re.findall(r"need (\d+) bytes", problem)[0])
    # Two workers, two slots each, and for the copy of each two, and one more.
    slot = needed // 10
    assert slot * 10 == needed
    assert 4 << 20 < slot < 5 << 20


@pytest.mark.parametrize("whose", ["another job's", "another pod's"])
def test_a_keeper_with_a_wrong_certificate_gets_no_copies(
    pods: Make, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    owner, holder = pods("owner", "holder")
    owner.start()
    if whose == "another job's":
        holder.authority = PodAuthority("a job's key of any length", f"{JOB}-2")
    else:
        holder.named = "somebody"
    holder.start()
    holder.tell(owners=("owner",))
    owner.tell(holder)
    save(monkeypatch, owner, 3)
    problem = wait_until(lambda: dict(owner.held.problems).get("holder"), "a problem that is told")
    wanted = "certificate" if whose == "another job's" else "want the keeper of pod holder, got that of 'somebody'"
    assert wanted in problem
    assert holder.kept("owner") == set()
    # Once it has its own, all goes well: the copies were only late.
    holder.kill()
    holder.authority, holder.named = owner.authority, "holder"
    holder.start()
    holder.wait_kept(owner, 3)


def test_a_keeper_that_is_not_asked_to_keep_takes_nothing(pods: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, holder = pair(pods)
    holder.tell(owners=("somebody",))
    save(monkeypatch, owner, 3)
    problem = wait_until(lambda: dict(owner.held.problems).get("holder"), "a problem that is told")
    assert problem == "this pod is not to keep your copies"
    assert holder.kept("owner") == set()


def test_a_new_pod_holds_the_steps_for_as_long_as_those_that_keep_the_protected_one(
    pods: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen before: it had two slots for what came, and was past each step before all others had it. So none of them was
    ever that of all ranks, and none was protected any more, in a job with a save each 40 ms.
    """
    (pod,) = pods("new")
    pod.buddies = Buddies(1, protected=(0, 1, 1, 1))
    pod.start()
    wait_until(lambda: any(pod.root.rglob(PINNED_NAME)), "what all others keep", describe=lambda: str(pod.held))
    with worker_of(monkeypatch, pod):
        saved = [step for step in range(2, 18) if isinstance(Checkpointer().save(state_of(step, 100), step), Saved)]
    assert saved == [2, 4, 8, 16]


def test_copies_of_a_lost_pod_give_way_to_those_of_its_successor_and_that_is_told(
    pods: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, successor = pods("lost", "successor")
    (holder,) = pods("holder", limit_bytes=3 * (9 << 19))
    for pod in (lost, successor, holder):
        pod.start()
    holder.tell(owners=("lost",))
    lost.tell(holder)
    for saved in (3, 4):
        save(monkeypatch, lost, saved)
        holder.wait_kept(lost, saved)
    lost.close()
    holder.buddies = Buddies(1, owners=("successor",), protected=(0, 1, 3, 1))
    holder.send(holder.buddies)
    successor.tell(holder)
    with worker_of(monkeypatch, successor):
        assert isinstance(Checkpointer().save(state_of(5, 1 << 22), 5), Saved)
    # Nothing else is told: there is no room for this one, whatever goes.
    wait_until(lambda: holder.kept("lost") == {3}, "one that is told as gone", describe=lambda: str(holder.held))
    assert holder.kept("successor") == set()
    for saved in (6, 7):
        save(monkeypatch, successor, saved)
        holder.wait_kept(successor, saved)
    assert holder.kept("lost") == {3}


def test_a_protected_step_stays_while_later_ones_are_saved(pods: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves go into the other slot, round steps for longer; one that is to be protected next stays as well."""
    (pod,) = pods("owner")
    pod.start()

    def attempt(step: int) -> bool:
        return isinstance(Checkpointer().save(state_of(step, 100), step), Saved)

    def held() -> set[int]:
        return {one.step for one in pod.held.holdings}

    def pin(protected: int, following: int | None = None) -> None:
        """Say what stays, and wait until the keeper says that it does."""
        keys: list[Key | None] = [None if step is None else (0, 1, step, 1) for step in (protected, following)]
        pod.buddies = Buddies(1, protected=keys[0], next_protected=keys[1])
        pod.send(pod.buddies)
        wait_pinned()

    def wait_pinned() -> None:
        named = (pod.buddies.protected, pod.buddies.next_protected)
        wanted = tuple(key for key in named if key is not None)
        wait_until(lambda: pod.held.pinned == wanted, f"{wanted} pinned", describe=lambda: f"{pod.held} {pod.errors()}")

    with worker_of(monkeypatch, pod):
        assert attempt(1)
        pin(1)
        assert attempt(2)
        assert not attempt(3), "less round than what is there"
        assert attempt(4)
        pin(1, 4)
        assert not attempt(8), "both are needed"
        wait_until(lambda: held() == {1, 4}, "both", describe=lambda: str(pod.held))
        pin(4)
        assert attempt(9)
        wait_until(lambda: held() == {4, 9}, "both", describe=lambda: str(pod.held))
        # Seen before: without a keeper the worker saved over what all other ranks kept.
        pod.kill()
        assert attempt(10)
        assert attempt(12)
        # A new keeper is told the same, and pins the same.
        pod.start()
        wait_until(lambda: held() == {4, 12}, "both", describe=lambda: str(pod.held))
        wait_pinned()
        assert attempt(16)
        assert not attempt(17)
        wait_until(lambda: held() == {4, 16}, "both", describe=lambda: str(pod.held))
        # One that is told of no protected step believes no earlier one.
        pod.kill()
        pod.buddies = Buddies(1)
        pod.start()
        (pinned,) = pod.root.rglob(PINNED_NAME)
        wait_until(lambda: not pinned.exists(), f"no {pinned}", describe=lambda: str(pod.held))
        assert attempt(32)
        assert attempt(33)
        wait_until(lambda: held() == {32, 33}, "both", describe=lambda: str(pod.held))


def test_what_is_to_be_protected_next_stays_as_well_while_there_is_no_keeper(
    pods: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen before: all others were told meanwhile that it is protected, and its copy was lost a second later."""
    (pod,) = pods("owner")
    pod.start()

    def attempt(step: int) -> bool:
        return isinstance(Checkpointer().save(state_of(step, 100), step), Saved)

    def held() -> set[int]:
        return {one.step for one in pod.held.holdings}

    with worker_of(monkeypatch, pod):
        assert attempt(1)
        assert attempt(4)
        pod.buddies = Buddies(1, protected=(0, 1, 1, 1), next_protected=(0, 1, 4, 1))
        pod.send(pod.buddies)
        wait_until(lambda: len(pod.held.pinned) == 2, "both pinned", describe=lambda: f"{pod.held} {pod.errors()}")
        pod.kill()
        assert not attempt(8), "the others may keep either"
        # It costs no saves for ever: a keeper would not hold it for longer, either.
        (coming,) = pod.root.rglob(COMING_NAME)
        *order, _until_s = coming.read_text().split()
        coming.write_text(" ".join((*order, "1")))
        assert attempt(16)
        assert attempt(32)
        pod.buddies = Buddies(1, protected=(0, 1, 1, 1))
        pod.start()
        wait_until(lambda: held() == {1, 32}, "both", describe=lambda: str(pod.held))
        wait_until(lambda: len(pod.held.pinned) == 1, "one pinned", describe=lambda: str(pod.held))
        wait_until(lambda: not coming.exists(), f"no {coming}", describe=lambda: str(pod.held))
