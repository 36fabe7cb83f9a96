"""Training of many kinds, while each rank becomes another one: what is saved is compared by the test.

In each iteration every kind loads its newest checkpoint, trains two steps, saves, reads the file back, and trains one
more step that is lost. Then the iteration ends by a fault.
"""

import hashlib
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional
from torch.distributed import _functional_collectives as collectives
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from unbroken import inprocess

from .script import my_rank, note

WIDTH, BATCH = 10, 12
"""WIDTH is no multiple of 4: shards are uneven, and a stale offset is not hidden by equal ones."""
NUM_ITERATIONS = int(os.environ.get("TEST_ITERATIONS", "6"))


def model(hidden: int = 14) -> torch.nn.Sequential:
    """Return the same small model on every rank."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, WIDTH))


def batch(step: int, part: int = 0, num_parts: int = 1) -> torch.Tensor:
    """Return this part of the data of a step, which depends on the step alone."""
    generator = torch.Generator().manual_seed(step)
    return torch.rand(BATCH, WIDTH, generator=generator).chunk(num_parts)[part]


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Return a digest of names, shapes and bits."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        found.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()[:16]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a sharded one; a collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Kind(ABC):
    """One way to train. What differs from rank to rank is in `build` and `loss`."""

    name: ClassVar[str]

    def __init__(self, folder: Path) -> None:
        self.folder = folder / self.name
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.model = self.build()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05, foreach=False)

    @abstractmethod
    def build(self) -> torch.nn.Module:
        """Return the model, distributed."""

    def loss(self, step: int) -> torch.Tensor:
        """Return the loss of one step."""
        found: torch.Tensor = self.model(batch(step, self.rank, self.world)).square().mean()
        return found

    def step(self, step: int) -> None:
        """Train one step."""
        self.optimizer.zero_grad()
        self.loss(step).backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """Return what is saved."""
        weights, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": optimizer}

    def load(self, step: int) -> None:
        """Take the checkpoint of this step."""
        state = self.state()
        load(state, checkpoint_id=self.folder / str(step))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def save(self, step: int) -> None:
        """Write the checkpoint of this step."""
        save(self.state(), checkpoint_id=self.folder / str(step))

    def weights(self) -> dict[str, torch.Tensor]:
        """Return all parameters, whole; a collective."""
        return {
            # Of a wrapper of DDP or of the compiler, which is not in the checkpoint's names.
            name.removeprefix("module.").removeprefix("_orig_mod."): whole(parameter).detach().clone()
            for name, parameter in self.model.named_parameters()
        }

    def read_back(self, step: int) -> dict[str, torch.Tensor]:
        """Return the parameters as the file has them, without a group or a mesh."""
        blank = {name: torch.full_like(tensor, torch.nan) for name, tensor in self.weights().items()}
        load({"model": blank}, checkpoint_id=self.folder / str(step), no_dist=True)
        return blank


class Ddp(Kind):
    name = "DDP"

    def build(self) -> torch.nn.Module:
        return torch.nn.parallel.DistributedDataParallel(model())


class Fsdp2(Kind):
    name = "FSDP2"

    def build(self) -> torch.nn.Module:
        built = model()
        mesh = init_device_mesh("cpu", (self.world,), mesh_dim_names=("dp",))
        for layer in built:
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(built, mesh=mesh)
        return built


class EvenFsdp2(Kind):
    """Shards of one size: stale offsets still tile the tensor, and torch writes a wrong checkpoint without an error."""

    name = "FSDP2 of even shards"

    def build(self) -> torch.nn.Module:
        torch.manual_seed(0)
        built = torch.nn.Sequential(torch.nn.Linear(WIDTH, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
        fully_shard(built, mesh=init_device_mesh("cpu", (self.world,), mesh_dim_names=("dp",)))
        return built


class Hsdp(Kind):
    name = "HSDP"

    def build(self) -> torch.nn.Module:
        built = model()
        mesh = init_device_mesh("cpu", (self.world // 2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(built, mesh=mesh)
        return built


class Tp(Kind):
    name = "TP"

    def build(self) -> torch.nn.Module:
        mesh = init_device_mesh("cpu", (self.world,), mesh_dim_names=("tp",))
        return parallelize_module(model(hidden=16), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def loss(self, step: int) -> torch.Tensor:
        found: torch.Tensor = self.model(batch(step)).square().mean()
        return found


class TpFsdp(Kind):
    name = "TP+FSDP"

    def build(self) -> torch.nn.Module:
        self.mesh = init_device_mesh("cpu", (self.world // 2, 2), mesh_dim_names=("dp", "tp"))
        built = parallelize_module(model(hidden=16), self.mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(built, mesh=self.mesh["dp"])
        return built

    def loss(self, step: int) -> torch.Tensor:
        dp = self.mesh["dp"]
        found: torch.Tensor = self.model(batch(step, dp.get_local_rank(), dp.size())).square().mean()
        return found


class AsyncSave(Fsdp2):
    name = "DCP async_save"

    def save(self, step: int) -> None:
        saving: Any = async_save(self.state(), checkpoint_id=self.folder / str(step))
        saving.result()


class Compiled(Tp):
    name = "compile+TP"

    def build(self) -> torch.nn.Module:
        built = super().build()
        built.compile(backend="aot_eager")
        return built


class CompiledCollective(Ddp):
    name = "compile+collective"

    def build(self) -> torch.nn.Module:
        group = dist.new_group(list(range(self.world)))

        def weighted(value: torch.Tensor) -> torch.Tensor:
            # The rank and the group's name become constants of the compiled code.
            found: torch.Tensor = collectives.all_reduce(value * (dist.get_rank() + 1), "sum", group)
            return found

        self.weighted = _compiled(weighted)
        return super().build()

    def loss(self, step: int) -> torch.Tensor:
        factor: torch.Tensor = self.weighted(torch.ones(1) * step)
        return super().loss(step) * factor


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="aot_eager", fullgraph=True)


class Slices(Ddp):
    name = "DeviceMesh slices"

    def build(self) -> torch.nn.Module:
        self.mesh = init_device_mesh("cpu", (2, self.world // 2), mesh_dim_names=("a", "b"))
        return super().build()

    def loss(self, step: int) -> torch.Tensor:
        total = torch.zeros(())
        for number, dim in enumerate(("a", "b")):
            part = self.mesh[dim]
            value = torch.tensor(float((self.rank + 1) * 10**number))
            dist.all_reduce(value, group=part.get_group())
            total = total + value * (part.get_local_rank() + 1)
        flat = self.mesh["a", "b"]._flatten("all")
        dist.all_reduce(total, group=flat.get_group())
        return super().loss(step) * total * 1e-3


class Ops(Fsdp2):
    name = "DTensor ops"

    def loss(self, step: int) -> torch.Tensor:
        mesh = init_device_mesh("cpu", (self.world // 2, 2), mesh_dim_names=("x", "y"))
        table = torch.arange(7.0 * 9).reshape(7, 9) / 50
        nested: Any = distribute_tensor(table, mesh, [Shard(0), Shard(0)])
        crossed = nested.redistribute(mesh, [Shard(1), Replicate()]) * 2 + 1
        product = crossed.redistribute(mesh, [Shard(0), Shard(1)]) @ distribute_tensor(
            table.t(), mesh, [Replicate(), Replicate()]
        )
        summed: Any = DTensor.from_local(torch.full((3,), float(self.rank)), mesh, [Partial(), Partial()])
        value = whole(product.detach().sum()) + whole(summed.redistribute(mesh, [Shard(0), Replicate()])).sum()
        return super().loss(step) * value * 1e-3


class Pipeline(Kind):
    name = "pipeline"

    def build(self) -> torch.nn.Module:
        # Two stages; in a larger world as many pipelines beside each other as there is room for.
        self.stage_number = self.rank % 2
        for first in range(0, self.world, 2):
            group = dist.new_group([first, first + 1])
            if first == self.rank - self.stage_number:
                self.group = group
        whole_model = model()
        part = whole_model[:2] if self.stage_number == 0 else whole_model[2:]
        stage = PipelineStage(part, self.stage_number, 2, torch.device("cpu"), group=self.group)
        self.schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=_squared)
        return part

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        if self.stage_number == 0:
            self.schedule.step(batch(step))
        else:
            self.schedule.step(target=torch.zeros(BATCH, WIDTH))
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        # Each stage under names of its own.
        weights, optimizer = get_state_dict(self.model, self.optimizer)
        return {f"stage {self.stage_number}": {"model": weights, "optimizer": optimizer}}

    def load(self, step: int) -> None:
        state = self.state()
        load(state, checkpoint_id=self.folder / str(step))
        ((_, mine),) = state.items()
        set_state_dict(self.model, self.optimizer, model_state_dict=mine["model"], optim_state_dict=mine["optimizer"])

    def read_back(self, step: int) -> dict[str, torch.Tensor]:
        blank = {name: torch.full_like(tensor, torch.nan) for name, tensor in self.weights().items()}
        load({f"stage {self.stage_number}": {"model": blank}}, checkpoint_id=self.folder / str(step), no_dist=True)
        return blank


def _squared(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(output, target)


KINDS: tuple[type[Kind], ...] = (
    Ddp,
    Fsdp2,
    EvenFsdp2,
    Hsdp,
    Tp,
    TpFsdp,
    AsyncSave,
    Compiled,
    CompiledCollective,
    Slices,
    Ops,
    Pipeline,
)


def num_saved(kind: type[Kind]) -> int:
    """Return the number of this scenario: how many have saved their last kind; the same on all ranks."""
    folder = Path(os.environ["TEST_CHECKPOINTS"]) / kind.name
    number = torch.tensor(len(list(folder.glob("*/.metadata"))))
    dist.broadcast(number, 0)
    return int(number)


def train_kind(kind: type[Kind], number: int) -> None:
    """Train two steps of this kind from its newest checkpoint, save, compare with the file; then one more."""
    training = kind(Path(os.environ["TEST_CHECKPOINTS"]))
    first = 2 * number
    if first:
        training.load(first)
    begun = training.weights()
    for step in (first, first + 1):
        training.step(step)
    training.save(first + 2)
    dist.barrier()
    trained, read = training.weights(), training.read_back(first + 2)
    note(
        "saved",
        kind=kind.name,
        number=number,
        world=training.world,
        pid=os.getpid(),
        begun=digest(begun),
        trained=digest(trained),
        read=digest(read),
    )
    training.step(first + 2)


@contextmanager
def _named(kind: type[Kind]) -> Iterator[None]:
    """Say which kind failed."""
    try:
        yield
    except Exception as error:
        note("failed", kind=kind.name, text=f"{type(error).__name__}: {error}"[:600])
        raise


def run() -> None:
    """Train all kinds that TEST_KINDS names, or all, in one iteration after the other."""
    wanted = os.environ.get("TEST_KINDS", "")
    kinds = [kind for kind in KINDS if not wanted or kind.name in wanted.split(",")]

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper) -> None:
        dist.init_process_group("gloo")
        number = num_saved(kinds[-1])
        for kind in kinds:
            with _named(kind):
                train_kind(kind, number)
        dist.barrier()
        note("ends", iteration=call.iteration)
        if number + 1 < NUM_ITERATIONS:
            end(number)

    train()


def end(number: int) -> None:
    """End the scenario: TEST_VICTIM ("number local_rank") is killed in that one, rank 0 raises in all others."""
    of_number, local_rank = os.environ.get("TEST_VICTIM", "-1 -1").split()
    if int(of_number) != number:
        if my_rank() == 0:
            raise ValueError("injected")
    elif local_rank == os.environ["UNBROKEN_LOCAL_RANK"]:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
