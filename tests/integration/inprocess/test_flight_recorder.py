"""The flight recorder of torch, with real collectives of gloo."""

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.waiting import LIMIT_S, wait_until

from unbroken.inprocess.abort import AbortTorchDistributed
from unbroken.inprocess.state import FrozenState, Mode
from unbroken.inprocess.torch_state import flight_recorder
from unbroken.inprocess.torch_state.group_states import Groups, begin_iteration, read_groups
from unbroken.inprocess.torch_state.groups import take_groups
from unbroken_core.protocol.messages import GroupState


@pytest.fixture
def reduced(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A group of one rank that has reduced something, on a machine whose disk may be slow."""
    monkeypatch.setattr(flight_recorder, "DUMP_TIMEOUT_S", LIMIT_S)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    store = torch._C._distributed_c10d.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    dist.all_reduce(torch.ones(3))
    yield
    take_groups()


def at(iteration: int, active_rank: int | None = 3) -> FrozenState:
    return FrozenState(rank=3, world_size=4, active_rank=active_rank, iteration=iteration, mode=Mode.ACTIVE)


@pytest.mark.usefixtures("reduced")
def test_collectives_of_the_rank_are_written_before_they_are_aborted(tmp_path: Path) -> None:
    """2.10: where the abort is told a folder, by its argument or by the environment."""
    AbortTorchDistributed(flight_recorder_dir=tmp_path)(at(iteration=7))
    (dump,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert dump == tmp_path / "iteration-7" / "rank_3"
    recorded = pickle.loads(dump.read_bytes())
    assert "gloo:all_reduce" in {entry["profiling_name"] for entry in recorded["entries"]}


def name_of_world() -> str:
    world = dist.group.WORLD
    assert world is not None
    return str(dist.distributed_c10d._world.pg_names[world])


def wait_recorded(wanted: Groups) -> None:
    """Wait until this is what is read: gloo's own thread notes the end of a collective, and may do so after its caller
    has gone on."""
    found: list[Groups] = []

    def is_recorded() -> bool:
        found[:] = [read_groups()]
        return found == [wanted]

    wait_until(is_recorded, str(wanted), describe=lambda: str(found))


@pytest.mark.usefixtures("reduced")
def test_groups_are_read_while_they_live_and_not_those_before_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = name_of_world()
    reduced = GroupState(name, "0", 1, -1, "", ("all_reduce Float[3]",))
    wait_recorded(Groups(1, 1, (reduced,)))
    take_groups()
    assert read_groups().states == ()
    store = torch._C._distributed_c10d.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    # Its records have the numbers of the first one, and may have its name.
    (anew,) = read_groups().states
    assert (anew.begun, anew.pending, anew.last) == (0, -1, ())
    dist.barrier()
    wait_recorded(Groups(1, 1, (GroupState(anew.name, anew.members, 1, -1, "", ("barrier",)),)))
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "5000")
    (unread,) = read_groups().states
    assert (unread.begun, unread.last) == (1, ())


PEER = """
import sys
import torch
import torch.distributed as dist
store = torch._C._distributed_c10d.FileStore(sys.argv[1], 2)
dist.init_process_group("gloo", store=store, rank=1, world_size=2)
dist.all_reduce(torch.ones(3))
for _ in range(2):
    dist.recv(torch.ones(1), 0)
"""


def test_what_is_sent_and_received_counts_as_no_collective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo counts it, and records nothing of it: ranks that sent more would seem to have begun what others wait in."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    path = str(tmp_path / "store")
    peer = subprocess.Popen([sys.executable, "-c", PEER, path])
    try:
        store = torch._C._distributed_c10d.FileStore(path, 2)
        dist.init_process_group("gloo", store=store, rank=0, world_size=2)
        dist.all_reduce(torch.ones(3))
        for _ in range(2):
            dist.send(torch.ones(1), 1)
        state = GroupState(name_of_world(), "0-1", 1, -1, "", ("all_reduce Float[3]",))
        found: list[Groups] = []

        def is_recorded() -> bool:
            found[:] = [read_groups()]
            return found[0].states == (state,)

        wait_until(is_recorded, str(state), describe=lambda: str(found))
        assert peer.wait(LIMIT_S) == 0
    finally:
        peer.kill()
        peer.wait()
        take_groups()


SENT_FIRST = """
import sys
import torch
import torch.distributed as dist
store = torch._C._distributed_c10d.FileStore(sys.argv[1], 2)
dist.init_process_group("gloo", store=store, rank=1, world_size=2)
for _ in range(2):
    dist.recv(torch.ones(1), 0)
sys.stdin.readline()
dist.all_reduce(torch.ones(4))
# Else threads of gloo may still run when the process ends, which aborts it.
dist.destroy_process_group()
"""


@pytest.mark.usefixtures("reduced")
def test_collectives_of_a_group_before_are_not_taken_for_those_of_one_that_has_only_sent_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers that gloo counts do not show it, and the groups of each iteration have the same names."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    name = name_of_world()
    wait_recorded(Groups(1, 1, (GroupState(name, "0", 1, -1, "", ("all_reduce Float[3]",)),)))
    take_groups()
    begin_iteration()
    path = str(tmp_path / "store")
    with subprocess.Popen([sys.executable, "-c", SENT_FIRST, path], stdin=subprocess.PIPE) as peer:
        try:
            store = torch._C._distributed_c10d.FileStore(path, 2)
            dist.init_process_group("gloo", store=store, rank=0, world_size=2, group_name=name)
            for _ in range(2):
                dist.send(torch.ones(1), 1)
            assert read_groups() == Groups(-1, 1)
            assert peer.stdin is not None
            peer.stdin.write(b"go on\n")
            peer.stdin.flush()
            dist.all_reduce(torch.ones(4))
            wait_recorded(Groups(1, 1, (GroupState(name, "0-1", 1, -1, "", ("all_reduce Float[4]",)),)))
            assert peer.wait(LIMIT_S) == 0
        finally:
            peer.kill()


@pytest.mark.usefixtures("reduced")
def test_what_this_torch_does_not_tell_is_not_known_and_breaks_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = name_of_world()

    def garbage(**_options: bool) -> str:
        return json.dumps({"entries": [{"process_group": [name, ""], "collective_seq_id": "many"}]})

    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_fr_trace_json", garbage)
    # The number that gloo itself has counts sends as well: one rank would seem behind another.
    assert read_groups() == Groups(-1, 1)
    assert "collectives not read: error=ValueError" in caplog.text
    monkeypatch.delattr(torch._C._distributed_c10d, "_dump_fr_trace_json")
    (state,) = read_groups().states
    assert (state.begun, state.last) == (1, ())


@pytest.mark.usefixtures("reduced")
def test_only_the_last_dumps_of_a_process_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(flight_recorder.FOLDER_VARIABLE, str(tmp_path))
    abort = AbortTorchDistributed()
    for iteration in range(flight_recorder.KEPT_DUMPS + 2):
        abort(at(iteration))
    kept = {folder.name for folder in tmp_path.iterdir()}
    assert kept == {f"iteration-{iteration}" for iteration in range(2, flight_recorder.KEPT_DUMPS + 2)}


@pytest.mark.usefixtures("reduced")
def test_folder_that_cannot_be_written_is_named_and_hinders_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    AbortTorchDistributed(flight_recorder_dir=tmp_path / "file")(at(iteration=0))
    assert f"flight recorder not written: file={tmp_path / 'file' / 'iteration-0' / 'rank_3'}" in caplog.text


@pytest.mark.usefixtures("reduced")
def test_spares_and_scripts_that_name_no_folder_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    AbortTorchDistributed()(at(iteration=0))
    AbortTorchDistributed(flight_recorder_dir=tmp_path)(at(iteration=0, active_rank=None))
    assert list(tmp_path.iterdir()) == []
