"""Trains a small model of one kind with checkpoints in memory, and breaks as it is told.

    memory_workload.py KIND FOLDER [FAULT...]        KIND: ddp, fsdp2, hsdp        FAULT: WHAT:ITERATION:RANK:STEP

WHAT is `raise`, `kill` (this process), `kill-pod` (its launcher), `kill-agent`, `kill-keeper`, `stop-keeper`, or a
point of the next save at which this process is killed: `begun`, `copied`, `half-sealed`, `sealed`; or of the load of
that iteration (any STEP): `found`, `verified`, `half-read`, `read`; `corrupt` flips a bit of what was saved last and
raises; `hold` says so in FOLDER/held, and waits in that step to be killed; `stop-writer` stops the process that writes
this rank's parts to the disk, and says which one in FOLDER/stopped. `kill-rendezvous`, also behind a point and an `@`,
as in `sealed@kill-rendezvous`, kills the rendezvous there, and this rank goes on without it. A STEP behind the last one
is where all that is left is to wait for the disk.
Each rank writes a line a step to FOLDER/losses: "ITERATION RANK STEP LOSS", the loss as bits; and "restored ITERATION
RANK STEP" to FOLDER/restored. With TEST_STATE=1 the first rank writes "ITERATION SAVED-OR-LOADED STEP DIGEST" of the
whole state to FOLDER/states. With TEST_INSIST=1 a save that is skipped is tried again. After step TEST_FLUSH_AT, as at
the end, all ranks wait until what was due on the disk is there. With TEST_TWICE=1 each step is saved twice, and
`again-WHAT` happens between the two, `late-WHAT` before both, once the other ranks have made theirs. With
TEST_WRAPPED=1 model and optimizer are in one object, whose dictionary has theirs.
"""

import contextlib
import hashlib
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from unbroken import inprocess, memory
from unbroken.keeper.digests import read_digests, read_slot_head
from unbroken.memory.arena import WorkerSlots
from unbroken.memory.client import KeeperClient
from unbroken.memory.reading import Contents
from unbroken.memory.slots import Slot
from unbroken_core.pod.memory_slots import CONTENT_OFFSET, Head, Sample, SlotState, pack_head

KIND, FOLDER, *FAULTS = sys.argv[1:]
NUM_STEPS = int(os.environ.get("TEST_STEPS", "12"))
EVERY = int(os.environ.get("TEST_EVERY", "2"))
DISK = os.environ.get("TEST_DISK")
DISK_EVERY = int(os.environ["TEST_DISK_EVERY"]) if "TEST_DISK_EVERY" in os.environ else None
FLUSH_AT = int(os.environ.get("TEST_FLUSH_AT", "-1"))
IS_TWICE = os.environ.get("TEST_TWICE") == "1"
LIMIT_S = 200.0
LOAD_POINTS: dict[str, tuple[Any, str, bool]] = {
    "found": (WorkerSlots, "find", True),
    "verified": (Contents, "verify", True),
    # After the first tensor, where the others are still as the script has made them.
    "half-read": (DefaultLoadPlanner, "commit_tensor", True),
    "read": (WorkerSlots, "loaded", False),
}
"""Points of a load: the owner of the function that is called there, and whether it is over by then."""


def note(name: str, *words: object) -> None:
    """Append a line, whole."""
    with (Path(FOLDER) / name).open("a") as file:
        file.write(" ".join(map(str, words)) + "\n")


def make_model() -> tuple[nn.Module, nn.Module]:
    """Return the model that trains and the one that is saved: with dropout, tied weights and uneven shards."""
    torch.manual_seed(0)
    first, second, tied = nn.Linear(6, 17), nn.Linear(6, 6), nn.Linear(6, 6)
    tied.weight = second.weight
    plain = nn.Sequential(first, nn.ReLU(), nn.Dropout(0.2), nn.Linear(17, 6), second, tied)
    if KIND == "ddp":
        # Else its buckets, and with them the order of sums, differ between the first step after a restart and others.
        return DistributedDataParallel(plain, find_unused_parameters=True), plain
    world_size = dist.get_world_size()
    if KIND == "hsdp":
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world_size,))
    fully_shard(plain, mesh=mesh)
    return plain, plain


class Randomness:
    """State of this rank's random numbers, which dropout uses."""

    def state_dict(self) -> dict[str, Any]:
        """Return it."""
        return {f"rank-{dist.get_rank()}": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it."""
        torch.set_rng_state(state[f"rank-{dist.get_rank()}"])


class Training:
    """Model and optimizer as one object. A new optimizer's dictionary has no averages yet."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._parts: dict[str, Any] = {"model": model, "optimizer": optimizer}

    def state_dict(self) -> dict[str, Any]:
        """Return the dictionaries of both."""
        return {name: one.state_dict() for name, one in self._parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give both theirs."""
        for name, one in self._parts.items():
            one.load_state_dict(state[name])


def break_if_due(iteration: int, step: int, before: str = "") -> None:
    """Do what the arguments say of this iteration, rank and step, and of what comes next."""
    for fault in FAULTS:
        what, *when = fault.split(":")
        if [int(one) for one in when] != [iteration, dist.get_rank(), step] or not what.startswith(before):
            continue
        what = what.removeprefix(before)
        if what == "raise":
            raise ValueError("injected")
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "kill-pod":
            os.kill(launcher_pid(), signal.SIGKILL)
            signal.pause()
        if what in ("kill-agent", "kill-keeper", "kill-rendezvous", "stop-keeper", "stop-writer"):
            break_part(*what.split("-"))
        if what == "hold":
            note("held", iteration, dist.get_rank(), os.environ["UNBROKEN_POD"])
            signal.pause()
        if what == "corrupt":
            corrupt()
        point, _, victim = what.partition("@")
        if point in ("begun", "copied", "half-sealed", "sealed"):
            die_at(point, victim)


def wait_if_late(iteration: int, step: int) -> None:
    """Where the arguments say so, wait until all other ranks have saved this step twice."""

    def have_others_saved() -> bool:
        lines = [line.split() for line in (Path(FOLDER) / "twice").read_text().splitlines()]
        return sum((words[0], words[2]) == (str(iteration), str(step)) for words in lines) == dist.get_world_size() - 1

    when = f":{iteration}:{dist.get_rank()}:{step}"
    if any(fault.startswith("late-") and fault.endswith(when) for fault in FAULTS):
        wait_for(have_others_saved, "the second save of all other ranks")


def launcher_pid() -> int:
    """Return the process that started this one, or whose fork server did."""
    parents = psutil.Process().parents()
    return next(one.pid for one in parents if "unbroken.launch" in one.cmdline())


def break_part(how: str, part: str) -> None:
    """Break the rendezvous, or a process of this pod.

    After a kill wait for the next one, so that the next fault finds it. One that stands still may not have told its
    agent of the last save: the keeper after it finds that in the slots.
    """
    if part == "rendezvous":
        kill_rendezvous()
        return
    if part == "writer":
        (writer,) = (one for one in psutil.Process().children() if "unbroken.memory.background" in one.cmdline())
        writer.suspend()
        note("stopped", writer.pid)
        return
    module = f"unbroken.{part}"
    victim = part_of_pod(module)
    if victim is None:
        raise RuntimeError(f"no {module} in this pod")
    if how == "stop":
        victim.suspend()
        return
    victim.kill()

    def is_back() -> bool:
        found = part_of_pod(module)
        return found is not None and found.pid != victim.pid and is_listening(module)

    wait_for(is_back, f"a new {module}")
    time.sleep(1.0)


def kill_rendezvous() -> None:
    """Kill the job's rendezvous, and do not wait for the next one."""
    parent = psutil.Process(launcher_pid()).ppid()
    found: list[psutil.Process] = []

    def is_there() -> bool:
        for one in psutil.Process(parent).children():
            with contextlib.suppress(psutil.Error):
                found.extend([one] if "unbroken.rendezvous" in one.cmdline() else [])
        return bool(found)

    wait_for(is_there, "a rendezvous")
    found[0].kill()
    note("rendezvous-killed", found[0].pid)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Wait, but not for ever: then this rank fails and says why."""
    until_s = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > until_s:
            raise RuntimeError(f"want {what} within {LIMIT_S:g} s")
        time.sleep(0.02)


def is_saved(checkpointer: memory.Checkpointer, state: Any, step: int) -> bool:
    """Save a step, if it can be saved now."""
    return isinstance(checkpointer.save(state, step), memory.Saved)


def flush(call: inprocess.CallWrapper, checkpointer: memory.Checkpointer, step: int) -> None:
    """Wait, on all ranks together, until the newest checkpoint that was due is whole on the disk."""
    with call.disable_hang_protection():
        if not checkpointer.flush(timeout_s=LIMIT_S):
            raise RuntimeError(f"after step {step} the last checkpoint that was due is not on the disk")


def address(module: str) -> Path:
    """Return where a part listens."""
    return Path(os.environ["UNBROKEN_DIR"]) / f"{module.removeprefix('unbroken.')}.sock"


def part_of_pod(module: str) -> psutil.Process | None:
    """Return this pod's agent or keeper."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words, environment = process.cmdline(), process.environ()
            if module in words and environment.get("UNBROKEN_DIR") == os.environ["UNBROKEN_DIR"]:
                return process
    return None


def is_listening(module: str) -> bool:
    """Return whether a new part can be reached."""
    with socket.socket(socket.AF_UNIX) as connection:
        return connection.connect_ex(str(address(module))) == 0


def digested(step: int) -> set[int]:
    """Return the ranks, of all pods of this host, whose part of this step has its digests."""
    (own,) = Path("/dev/shm", f"unbroken-{os.getuid()}").glob(f"run-*/{os.environ['UNBROKEN_POD_UID']}")
    slots = own.parent.glob("*/*.slot")
    heads = {path: head for path in slots if (head := read_slot_head(path)) and head.moment.step == step}
    return {
        head.rank
        for path, head in heads.items()
        if read_digests(path.with_name(f"{path.name}.digests"), head) is not None
    }


def corrupt() -> None:
    """Flip a bit of the newest checkpoint of this rank, once its digests are there, and raise."""
    slots = Path("/dev/shm", f"unbroken-{os.getuid()}").glob(f"run-*/{os.environ['UNBROKEN_POD_UID']}/*.slot")
    heads = {path: head for path in slots if (head := read_slot_head(path)) and head.rank == dist.get_rank()}
    newest = max(heads, key=lambda path: heads[path].moment.order)
    # Those of the other ranks, too: a step that is not whole yet is not looked at.
    step, world_size = heads[newest].moment.step, dist.get_world_size()
    wait_for(lambda: len(digested(step)) >= world_size, f"digests of step {step} of all ranks")
    with newest.open("r+b") as file:
        file.seek(CONTENT_OFFSET + heads[newest].objects_offset - 70)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    raise ValueError("a bit was flipped")


def at(owner: Any, name: str, *, is_after: bool, victim: str) -> None:
    """Kill this process, or the rendezvous, at the next call of a function, or right after it."""
    original = getattr(owner, name)

    def strike(*words: Any, **more: Any) -> Any:
        if victim:
            # First: where this rank is interrupted on its way, the next call kills.
            kill_rendezvous()
            setattr(owner, name, original)
            return original(*words, **more)
        if is_after:
            original(*words, **more)
        return os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, strike)


def die_at(point: str, victim: str) -> None:
    """Kill at a point of the next save."""

    def seal_half(slot: Slot, head: Head, samples: tuple[Sample, ...]) -> None:
        half = pack_head(replace(head, state=SlotState.SEALED, samples=samples))[:100]
        slot._map[: len(half)] = half
        os.kill(os.getpid(), signal.SIGKILL)

    if point == "half-sealed":
        at_seal: Any = Slot
        at_seal.seal = seal_half
        return
    owner, name = {"begun": (Slot, "copy"), "copied": (Slot, "seal"), "sealed": (KeeperClient, "tell")}[point]
    at(owner, name, is_after=False, victim=victim)


def die_in_load_if_due(iteration: int) -> None:
    """Kill at a point of this iteration's load, if the arguments say so."""
    for fault in tuple(FAULTS):
        what, *when = fault.split(":")
        point, _, victim = what.partition("@")
        first, rank = (int(one) for one in when[:2])
        # The iteration after a fault may end before its load, and another one has it.
        is_due = iteration == first or (victim and iteration > first)
        if point not in LOAD_POINTS or not is_due or rank != dist.get_rank():
            continue
        FAULTS.remove(fault)
        owner, name, is_after = LOAD_POINTS[point]
        at(owner, name, is_after=is_after, victim=victim)


def note_state(iteration: int, what: str, step: int | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Note the digest of all that is saved, put together from all ranks, so that worlds of all sizes have the same."""
    if os.environ.get("TEST_STATE") != "1":
        return
    digest = hashlib.sha256()
    moments = [optimizer.state[one] for one in model.parameters() if one in optimizer.state]
    values = [*model.parameters(), *(moment[name] for moment in moments for name in sorted(moment))]
    for value in values:
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        digest.update(whole.detach().numpy().tobytes())
    if dist.get_rank() == 0:
        note("states", iteration, what, step, digest.hexdigest())
    # Nobody goes on, and breaks, before it is noted.
    dist.barrier()


@inprocess.Wrapper()
def train(call: inprocess.CallWrapper) -> None:
    """Train to the last step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, saved = make_model()
    optimizer = torch.optim.AdamW(saved.parameters(), lr=0.01)
    torch.manual_seed(1000 + rank)
    state: dict[str, Any] = {"model": saved, "optimizer": optimizer}
    if os.environ.get("TEST_WRAPPED") == "1":
        state = {"training": Training(saved, optimizer)}
    if os.environ.get("TEST_RESIZE") != "1":
        state["random"] = Randomness()
    checkpointer = memory.Checkpointer(every=EVERY, disk=DISK, disk_every=DISK_EVERY)
    die_in_load_if_due(call.iteration)
    done = checkpointer.load(state)
    note("restored", call.iteration, rank, world_size, done)
    note_state(call.iteration, "loaded", done, saved, optimizer)
    for step in range(0 if done is None else done + 1, NUM_STEPS):
        break_if_due(call.iteration, step)
        data = torch.rand(8, 6, generator=torch.Generator().manual_seed(step))[rank::world_size]
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        bits = struct.pack("<f", loss.item()).hex()
        note("losses", call.iteration, rank, step, bits)
        if IS_TWICE:
            wait_if_late(call.iteration, step)
            break_if_due(call.iteration, step, "late-")
        saved_or_skipped = checkpointer.save(state, step)
        if IS_TWICE:
            break_if_due(call.iteration, step, "again-")
            checkpointer.save(state, step)
            note("twice", call.iteration, rank, step)
        if step % EVERY == 0:
            if os.environ.get("TEST_INSIST") == "1" and isinstance(saved_or_skipped, memory.Skipped):
                # What is being copied, by threads of the lowest priority, is not overwritten.
                with call.disable_hang_protection():
                    wait_for(partial(is_saved, checkpointer, state, step), f"a save of step {step}")
            note_state(call.iteration, "saved", step, saved, optimizer)
        if step == FLUSH_AT:
            flush(call, checkpointer, step)
        call.ping(step=step)
    break_if_due(call.iteration, NUM_STEPS)
    flush(call, checkpointer, NUM_STEPS - 1)
    dist.barrier()


if __name__ == "__main__":
    train()
