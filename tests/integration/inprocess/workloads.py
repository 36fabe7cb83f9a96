"""What the workers of the tests run; each function is one workload, chosen by its name."""

import ctypes
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from unbroken import inprocess

HANG_S = 3600.0
"""A hang that only an interruption ends; no test waits so long."""
LOCAL_RANK = int(os.environ.get("UNBROKEN_LOCAL_RANK", "-1"))


def note(name: str, **values: Any) -> None:
    """Write one event for the test."""
    rank = int(os.environ.get("RANK", "-1"))
    line = json.dumps({"name": name, "rank": rank, "local": os.environ.get("UNBROKEN_LOCAL_RANK"), **values}) + "\n"
    descriptor = os.open(os.environ["TEST_EVENTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def total(value: float = 1.0) -> float:
    """All-reduce a number."""
    tensor = torch.tensor([value])
    dist.all_reduce(tensor)
    return float(tensor.item())


def my_rank() -> int:
    """Return the active rank."""
    return int(os.environ["RANK"])


def start() -> float:
    """Join the group as any script does; return the sum of ones."""
    dist.init_process_group("gloo")
    return total()


def exists(variable: str) -> bool:
    """Return whether the file that the variable names is there."""
    return Path(os.environ[variable]).exists()


def is_first(call: inprocess.CallWrapper) -> bool:
    """Return whether this is the first iteration of the job (a process that was started later never sees it)."""
    return call.iteration == 0


def one_fault(call: inprocess.CallWrapper) -> int:
    """Rank 1 raises in the first iteration; return the size of the world."""
    start()
    if is_first(call):
        if my_rank() == 1:
            raise ValueError("injected")
        total()
    return int(total())


def tell_outcome(train: Callable[[], object]) -> None:
    """Call it, and write what it returns or raises."""
    try:
        note("returned", value=train())
    except BaseException as error:
        note("raised", error=type(error).__name__, text=str(error), cause=type(error.__cause__).__name__)
        raise


def exception_once() -> None:
    """Rank 1 raises while the others are inside all_reduce."""

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper, extra: int) -> str:
        world = start()
        note("started", iteration=call.iteration, world=world, extra=extra)
        if is_first(call):
            if my_rank() == 1:
                raise ValueError("injected")
            total()
        return f"value of {my_rank()} in {call.iteration}"

    note("returned", value=train(extra=7))


def compute() -> None:
    """Never end, in Python."""
    while True:
        pass


BLOCKS: dict[str, Callable[[], object]] = {
    "barrier": dist.barrier,
    "monitored_barrier": dist.monitored_barrier,
    "recv": lambda: dist.recv(torch.ones(1), src=1),
    "broadcast of objects": lambda: dist.broadcast_object_list([None], src=1),
    "new_group": lambda: dist.new_group([0, 1, 2]),
    "wait of an async all_reduce": lambda: dist.all_reduce(torch.ones(1), async_op=True).wait(),
    "store": lambda: dist.distributed_c10d._get_default_store().get("a key that nobody sets"),
    "sleep": lambda: time.sleep(HANG_S),
    "queue": lambda: queue.Queue[int]().get(),
    "lock": lambda: threading.Event().wait(),
    "socket": lambda: socket.socketpair()[0].recv(1),
    "child process": lambda: subprocess.run(["sleep", "3600"], check=True),
    "C function that a signal ends": lambda: ctypes.CDLL(None).sem_wait(ctypes.create_string_buffer(64)),
    "python": compute,
}


def blocked_in() -> None:
    """Rank 1 raises once the others say that they are about to block, each in the call that TEST_BLOCK names."""

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper) -> int:
        start()
        if is_first(call):
            note("blocks")
            if my_rank() == 1:
                while not exists("TEST_GO"):
                    time.sleep(0.01)
                raise ValueError("injected")
            BLOCKS[os.environ["TEST_BLOCK"]]()
        return int(total())

    note("returned", value=train())


def lost_before_connecting() -> None:
    """In the second iteration TEST_VICTIM is killed before it connects, while the others connect to it."""
    victim = int(os.environ["TEST_VICTIM"])

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper) -> int:
        if call.iteration == 1 and my_rank() == victim:
            note("victim")
            while not exists("TEST_GO"):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        note("connects", iteration=call.iteration)
        start()
        if is_first(call) and my_rank() == 1:
            raise ValueError("injected")
        return int(total())

    note("returned", value=train())


def store_is_gone() -> None:
    """In the first iteration all but rank 0 connect once the file TEST_GO is there: to a store whose server is dead."""

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper) -> int:
        note("waits")
        while is_first(call) and not exists("TEST_GO"):
            time.sleep(0.01)
        note("connects")
        return int(start())

    note("returned", value=train())


def steps() -> None:
    """Steps until the file TEST_DONE is there; every step is an all_reduce and a ping."""

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper) -> int:
        world = int(start())
        note("started", iteration=call.iteration, world=world, restart=os.environ["TORCHELASTIC_RESTART_COUNT"])
        step = 0
        while total(float(exists("TEST_DONE"))) == 0:
            step += 1
            call.ping(step=step)
            time.sleep(0.01)
        return world

    note("returned", value=train())


def hangs() -> None:
    """Rank 1 hangs in the first iteration as TEST_HANG says, the others in all_reduce."""
    how = os.environ["TEST_HANG"]

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper) -> int:
        start()
        if is_first(call):
            if my_rank() == 1:
                note("hangs", pid=os.getpid())
                if how == "holding the GIL":
                    ctypes.PyDLL(None).sleep(3600)
                elif how == "in C":
                    mutex = ctypes.create_string_buffer(64)
                    for _ in range(2):
                        ctypes.CDLL(None).pthread_mutex_lock(mutex)
                elif how == "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                elif how == "in an atomic section":
                    with call.atomic():
                        time.sleep(HANG_S)
                elif how == "in finally":
                    try:
                        time.sleep(HANG_S)
                    finally:
                        time.sleep(HANG_S)
            total()
        return int(total())

    note("returned", value=train())


def stubborn() -> None:
    """Rank 0 swallows everything in a loop, as TEST_LOOP says."""
    how = os.environ["TEST_LOOP"]

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper) -> int:
        start()
        if not is_first(call):
            return int(total())
        if my_rank() == 1:
            raise ValueError("injected")
        while True:
            try:
                if how == "sleeps":
                    time.sleep(0.05)
                elif how == "collective":
                    total()
                else:
                    sum(range(100))
            except BaseException:
                pass

    note("returned", value=train())


def cleans_up() -> None:
    """Rank 0 is interrupted inside two nested clean-ups, each of which takes a while."""

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper) -> int:
        start()
        if not is_first(call):
            return int(total())
        if my_rank() == 1:
            while not exists("TEST_GO"):
                time.sleep(0.01)
            raise ValueError("injected")
        try:
            try:
                note("blocks")
                total()
            finally:
                note("first begins")
                time.sleep(0.4)
                note("first ends")
        finally:
            deadline_s = time.monotonic() + 0.4
            while time.monotonic() < deadline_s:
                sum(range(100))
            note("second ends")
        return -1

    note("returned", value=train())


def atomic() -> None:
    """Rank 0 is inside nested atomic sections when rank 1 raises."""

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper) -> int:
        start()
        if not is_first(call):
            return int(total())
        if my_rank() == 1:
            while not exists("TEST_GO"):
                time.sleep(0.01)
            raise ValueError("injected")
        with call.atomic():
            with call.atomic():
                note("enters")
                while not exists("TEST_DONE"):
                    time.sleep(0.01)
            note("leaves", iteration=call.iteration)
        try:
            time.sleep(HANG_S)
        finally:
            try:
                with call.atomic():
                    note("entered again")
            except inprocess.RankShouldRestart:
                note("not entered again")
        return -1

    note("returned", value=train())


class ThreeArguments(Exception):
    """Cannot be copied or pickled, and has no text."""

    def __init__(self, one: object, two: object, three: object) -> None:
        super().__init__(one)
        self.numbers = (one, two, three)

    def __str__(self) -> str:
        raise RuntimeError("no text")


def odd_exception() -> None:
    """Rank 1 raises what TEST_RAISE says in the first iteration."""
    what = os.environ["TEST_RAISE"]

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper) -> int:
        start()
        if is_first(call) and my_rank() == 1:
            if what == "three arguments":
                raise ThreeArguments(1, 2, 3)
            if what == "huge":
                raise ValueError("x" * 100_000_000)
            if what == "system exit":
                sys.exit(5)
            if what == "keyboard interrupt":
                raise KeyboardInterrupt
            if what == "stop iteration":
                raise StopIteration
        return int(total())

    try:
        note("returned", value=train())
    except BaseException as error:
        note("raised", error=type(error).__name__, text=str(error)[:200])
        raise


def many_restarts() -> None:
    """TEST_RESTARTS restarts; each notes what the process holds, and whether the last iteration's tensor is gone."""
    count = int(os.environ["TEST_RESTARTS"])
    old: list[weakref.ref[torch.Tensor]] = []

    class Holder:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor
            self.cycle = self

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper) -> int:
        alive = sum(reference() is not None for reference in old)
        old.clear()
        if call.iteration % 10 == 0:
            note("holds", iteration=call.iteration, alive=alive, **holdings())
        else:
            note("alive", iteration=call.iteration, alive=alive)
        start()
        tensor = torch.ones(1000)
        holder = Holder(torch.ones(1000))
        old.extend((weakref.ref(tensor), weakref.ref(holder.tensor)))
        if call.iteration < count:
            if my_rank() == call.iteration % dist.get_world_size():
                raise ThreeArguments(tensor, holder, 0)
            total()
        return int(total())

    value = train()
    note("returned", value=value, threads=[thread.name for thread in threading.enumerate()])


def holdings() -> dict[str, int]:
    """Return what a leak would raise."""
    process = psutil.Process()
    return {
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "resident_bytes": process.memory_info().rss,
    }


def bystanders() -> None:
    """A thread, a connection, a child and a signal handler of the user's live through a restart."""
    handled: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: handled.append(number))
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    served, _ = listener.accept()
    ticks = [0]
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(0.005):
            ticks[0] += 1

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper) -> int:
        return one_fault(call)

    value = train()
    seen = ticks[0]
    while ticks[0] < seen + 3:
        time.sleep(0.005)
    client.sendall(b"still")
    os.kill(os.getpid(), signal.SIGTERM)
    after = {number: signal.getsignal(number) for number in signal.valid_signals()}
    note("returned", value=value, echo=served.recv(5).decode(), handled=handled, same=before == after)
    stop.set()


def forks() -> None:
    """Rank 0 forks a child in the function, as a data loader does, and is then lost; the child lives on."""

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper) -> int:
        start()
        if is_first(call) and my_rank() == 0:
            child = os.fork()
            if child == 0:
                with call.atomic():
                    call.ping(step=99)
                note("child", threads=threading.active_count(), sockets=agent_sockets())
                while not exists("TEST_DONE"):
                    time.sleep(0.01)
                os._exit(0)
            note("forked", child=child, sockets=agent_sockets())
        while total(float(exists("TEST_GO"))) == 0:
            time.sleep(0.01)
        if is_first(call):
            if my_rank() == 0:
                raise ValueError("injected")
            total()
        return int(total())

    note("returned", value=train())


def agent_sockets() -> int:
    """Return how many Unix sockets this process has open."""
    return len(psutil.Process().net_connections("unix"))


class Noting(inprocess.initialize.Initialize, inprocess.finalize.Finalize, inprocess.health_check.HealthCheck):
    """Notes its calls; raises where TEST_FAIL says `<name>@<iteration>` and this is rank 1."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
        fault = None if state.fn_exception is None else type(state.fn_exception).__name__
        note("called", plugin=self.name, iteration=state.iteration, fault=fault, at=state.active_rank)
        if os.environ.get("TEST_FAIL") == f"{self.name}@{state.iteration}" and state.active_rank == 1:
            raise OSError(f"{self.name} fails")
        return state


class NotingEnd(inprocess.completion.Completion, inprocess.terminate.Terminate, inprocess.abort.Abort):
    """Notes its calls; as an abort it raises where TEST_FAIL says abort."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
        note("called", plugin=self.name, iteration=state.iteration, fault=None, at=state.active_rank)
        if os.environ.get("TEST_FAIL") == self.name:
            raise OSError(f"{self.name} fails")
        return state


def plugins() -> None:
    """All plug-ins; rank 1 raises in the first iteration."""

    @inprocess.Wrapper(
        initialize=Noting("initialize"),
        abort=inprocess.Compose(NotingEnd("abort"), inprocess.abort.AbortTorchDistributed()),
        finalize=Noting("finalize"),
        health_check=Noting("health_check"),
        completion=NotingEnd("completion"),
        terminate=NotingEnd("terminate"),
    )
    def train(call: inprocess.CallWrapper) -> int:
        return one_fault(call)

    tell_outcome(train)


def limited() -> None:
    """Fails for ever, under a RetryController of four iterations."""

    @inprocess.Wrapper(initialize=inprocess.initialize.RetryController(max_iterations=4))
    def train() -> None:
        note("ran")
        raise ValueError("always")

    try:
        train()
    except inprocess.exception.RestartAbort as error:
        note("aborted", text=str(error))


def no_collectives() -> None:
    """Never calls init_process_group; rank 1 raises once."""

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper) -> str:
        note("ran", iteration=call.iteration)
        if is_first(call) and my_rank() == 1:
            raise ValueError("injected")
        return "done"

    note("returned", value=train())


def finishes_at_different_times() -> None:
    """Rank 0 returns at once; rank 1 raises once rank 0 has returned."""

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper) -> str:
        note("ran", iteration=call.iteration)
        if is_first(call) and my_rank() == 1:
            while not exists("TEST_GO"):
                time.sleep(0.01)
            raise ValueError("injected")
        return f"{my_rank()} in {call.iteration}"

    note("returned", value=train())


def raises_again_and_again() -> None:
    """Two ranks raise at once, then another one raises during the recovery, before it joins the group."""

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper) -> int:
        note("ran", iteration=call.iteration)
        if call.iteration == 1 and my_rank() == 0:
            raise ValueError("before the group")
        start()
        if call.iteration == 0 and my_rank() in (0, 1):
            raise ValueError("both")
        if call.iteration == 2 and my_rank() == 2:
            raise ValueError("third")
        return int(total())

    note("returned", value=train())


def health_fails_after_fault() -> None:
    """As `plugins`; rank 1's health check fails only after the fault, as its finalize does."""

    class HealthAfterFault(Noting):
        def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
            return state if state.fn_exception is None else super().__call__(state)

    @inprocess.Wrapper(
        finalize=Noting("finalize"), health_check=HealthAfterFault("health_check"), terminate=NotingEnd("terminate")
    )
    def train(call: inprocess.CallWrapper) -> int:
        return one_fault(call)

    tell_outcome(train)


def calls_twice() -> None:
    """Calls the wrapped function again, first with the group still there, then without."""

    @inprocess.Wrapper()
    def train(name: str) -> None:
        start()
        note(name)

    train("first")
    refused = []
    for _ in range(2):
        try:
            train("second")
        except (ValueError, inprocess.exception.RestartError) as error:
            refused.append(f"{type(error).__name__}: {error}")
        if dist.is_initialized():
            dist.destroy_process_group()
    note("second", refused=refused, threads=[thread.name for thread in threading.enumerate()])


def wrapped_inside() -> None:
    """Two wrapped functions in turn inside of a third; rank 1 raises in the second, TEST_ATTEMPTS times."""
    attempts = int(os.environ["TEST_ATTEMPTS"])

    class Named(inprocess.initialize.Initialize, inprocess.finalize.Finalize):
        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
            note("called", plugin=self.name, iteration=state.iteration)
            return state

    @inprocess.Wrapper(initialize=Named("first begins"), finalize=Named("first ends"))
    def first(call: inprocess.CallWrapper) -> float:
        world = start()
        dist.destroy_process_group()
        return world + call.iteration

    @inprocess.Wrapper(initialize=Named("second begins"), finalize=Named("second ends"))
    def second(call: inprocess.CallWrapper) -> float:
        world = start()
        if my_rank() == 1 and call.iteration < attempts:
            raise ValueError("injected inside")
        world += total()
        dist.destroy_process_group()
        return world

    @inprocess.Wrapper(finalize=Named("outer ends"))
    def both() -> list[float]:
        try:
            return [first(), second()]
        except Exception:
            note("seen outside")
        except BaseException:
            note("swallowed")
        time.sleep(HANG_S)
        return []

    note("returned", value=both())


def plan_is_too_large() -> None:
    """Asks for one active rank in a job of two."""

    @inprocess.Wrapper(rank_assignment=inprocess.rank_assignment.MaxActiveWorldSize(1))
    def train() -> None:
        note("ran")

    try:
        train()
    except inprocess.exception.RestartAbort as error:
        note("aborted", text=str(error))
