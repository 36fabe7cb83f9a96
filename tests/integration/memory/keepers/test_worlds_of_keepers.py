"""Real ranks over gloo, each in a pod with a keeper of its own: a spare takes over, and smaller worlds read ranges."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from tests.integration.inprocess.forked import MUCH_OF_TORCH, Forks
from tests.ports import free_port

from unbroken_core.pod.memory_slots import BLOCK_BYTES
from unbroken_core.protocol import wire
from unbroken_core.vocabulary.checkpoints import Candidate, Restore

from .keeper_pods import KeeperPod
from .world_of_keepers import STEP, WIDTH

WORKLOAD = str(Path(__file__).with_name("world_of_keepers.py"))
NUM = 4
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module", autouse=True)
def _zygote() -> Iterator[None]:
    yield
    MUCH_OF_TORCH.close()


@pytest.fixture
def pods(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[KeeperPod]]:
    """Four pods in a ring of two pairs, and a spare, which keeps nothing."""
    monkeypatch.setenv("UNBROKEN_LOG_LEVEL", "INFO")
    made = [KeeperPod(f"pod-{index}", f"127.0.0.{31 + index}", 256 << 20) for index in range(NUM + 1)]
    for pod in made:
        pod.start()
    for index, pod in enumerate(made[:NUM]):
        buddy = made[index ^ 1]
        pod.tell(buddy, owners=(buddy.uid,))
    yield made
    for pod in made:
        pod.close()


def run(what: str, folder: Path, kind: str, pods: Sequence[KeeperPod], restores: Sequence[Restore | None]) -> set[str]:
    """Run a world to its end, a rank in each pod; return what the ranks have written, but for the parts of each."""
    port = free_port()
    with closing(Forks(MUCH_OF_TORCH)) as forks:
        ranks = []
        for rank, (pod, restore) in enumerate(zip(pods, restores, strict=True)):
            environment = {
                **os.environ,
                "UNBROKEN_DIR": str(pod.folder),
                "UNBROKEN_MEMORY_LIMIT": str(pod.limit_bytes),
                "UNBROKEN_LOCAL_RANK": "0",
                "UNBROKEN_TERM": "1",
                "TORCHELASTIC_RESTART_COUNT": "0" if what == "train" else "1",
                "RANK": str(rank),
                "WORLD_SIZE": str(len(pods)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",
                "UNBROKEN_RESTORE": "" if restore is None else wire.encode(restore),
            }
            ranks.append(forks.start([WORKLOAD, what, str(folder), kind], environment, folder / f"log-{rank}"))
        codes = [one.wait() for one in ranks]
        assert codes == [0] * len(ranks), "\n".join(path.read_text() for path in sorted(folder.glob("log-*")))
    return {(folder / f"{what}-{rank}").read_text() for rank in range(len(pods))}


def train(folder: Path, kind: str, pods: list[KeeperPod]) -> str:
    """Save a step on all ranks, and wait for its copies; return the digest of the whole state."""
    found = run("train", folder, kind, pods[:NUM], [None] * NUM)
    for index in range(NUM):
        pods[index ^ 1].wait_kept(pods[index], STEP)
    (digest,) = {text.split()[1] for text in found}
    return digest


def lose(pod: KeeperPod) -> None:
    """A host is gone, with all of its memory."""
    pod.close()


def fetched_bytes(pod: KeeperPod) -> int:
    """Return what its keeper has fetched from others."""
    return sum(map(int, re.findall(r"shard fetched: .* bytes=(\d+)", pod.errors())))


def test_a_spare_restores_the_shard_of_a_lost_pod_from_its_buddy(pods: list[KeeperPod], tmp_path: Path) -> None:
    digest = train(tmp_path, "own", pods)
    lose(pods[2])
    holder, spare = pods[3], pods[4]
    told = Candidate(1, 0, STEP, NUM)
    plain = Restore((told,))
    of_spare = Restore((Candidate(1, 0, STEP, NUM, fetches=((2, 1, 2, holder.uid),)),), peers=(holder.peer,))
    world = [pods[0], pods[1], spare, pods[3]]
    found = run("restore", tmp_path, "own", world, [plain, plain, of_spare, plain])
    # All ranks have the same whole, and each the part that was its own.
    assert {tuple(text.split()[:2]) for text in found} == {(str(STEP), digest)}
    assert {text.partition("[")[2] for text in found} == {f"('rank-{rank}', {float(rank)})]" for rank in range(NUM)}
    assert fetched_bytes(spare) > 0
    assert [fetched_bytes(pod) for pod in (pods[0], pods[1], pods[3])] == [0, 0, 0]


def test_a_smaller_world_fetches_the_ranges_that_it_needs(pods: list[KeeperPod], tmp_path: Path) -> None:
    digest = train(tmp_path, "common", pods)
    lose(pods[3])
    left = pods[:3]
    # As the plan says who has what; shard 3 lies with pod 2.
    peers = tuple(pod.peer for pod in left)
    runs = ((0, 1, 0, "pod-0"), (1, 1, 1, "pod-1"), (2, 1, 2, "pod-2"), (3, 1, 3, "pod-2"))
    restores = [
        Restore((Candidate(1, 0, STEP, NUM, fetches=tuple(one for one in runs if one[3] != pod.uid)),), peers=peers)
        for pod in left
    ]
    found = run("restore", tmp_path, "common", left, restores)
    assert {tuple(text.split()[:2]) for text in found} == {(str(STEP), digest)}
    # Ranks 0 and 2 have all that they need: their own old shard, and the copy of their buddy's. Rank 1 needs two thirds
    # of the third shard: a part of each weight, and what is small. Of the block with its layout, all comes.
    assert [fetched_bytes(pod) for pod in (pods[0], pods[2])] == [0, 0]
    needed = 2 * 3 * WIDTH * WIDTH * 4 // NUM * 2 // 3
    assert needed < fetched_bytes(pods[1]) <= needed + 2 * BLOCK_BYTES


def test_one_rank_that_cannot_read_its_shard_means_that_none_restores(pods: list[KeeperPod], tmp_path: Path) -> None:
    train(tmp_path, "own", pods)
    lose(pods[2])
    # Its own keeper is named, which has gone with it: three ranks could read theirs, and none does.
    plain = Restore((Candidate(1, 0, STEP, NUM),))
    of_spare = Restore((Candidate(1, 0, STEP, NUM, fetches=((2, 1, 2, "pod-2"),)),), peers=(pods[2].peer,))
    world = [pods[0], pods[1], pods[4], pods[3]]
    found = run("restore", tmp_path, "own", world, [plain, plain, of_spare, plain])
    assert {text.split()[0] for text in found} == {"None"}
