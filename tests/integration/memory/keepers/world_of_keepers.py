"""One rank of a world over gloo: `world_of_keepers.py train|restore FOLDER`. Each rank has a pod and a keeper.

Writes FOLDER/<what>-<rank>: the step, and a digest of the whole state, as all ranks have it together.
"""

import hashlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from unbroken.memory import Checkpointer, Saved

STEP = 7
WIDTH = 1536


class Part:
    """What this rank alone has, if the world does not change."""

    def __init__(self, is_own: bool) -> None:
        self.values = {"common": 1.0} if not is_own else {f"rank-{dist.get_rank()}": float(dist.get_rank())}

    def state_dict(self) -> dict[str, Any]:
        """Return it."""
        return dict(self.values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it."""
        self.values = dict(state)


def digest_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a digest of all parameters and of the optimizer's state; all ranks call it."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        states = optimizer.state[parameter]
        for one in (parameter.detach(), *(states[name] for name in sorted(states))):
            whole = one.full_tensor() if hasattr(one, "full_tensor") else one
            found.update(whole.contiguous().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    """Train a step and save it, or restore it."""
    what, folder, is_own = sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "own"
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0 if what == "train" else 1)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    part = Part(is_own)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "part": part}
    step: int | None = STEP
    if what == "train":
        model(torch.rand(4, WIDTH)).square().mean().backward()
        optimizer.step()
        saved = Checkpointer().save(state, STEP)
        assert isinstance(saved, Saved), saved
    else:
        step = Checkpointer().load(state)
    digest = digest_of(model, optimizer) if step is not None else ""
    (folder / f"{what}-{rank}").write_text(f"{step} {digest} {sorted(part.values.items())}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
