"""Tensors that are more than their memory, or have none."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from unbroken.memory.shard import ShardReader
from unbroken.memory.slots import Author, Slot
from unbroken_core.pod.memory_slots import EMPTY, Moment, pack_head

VALUES = torch.complex(torch.arange(32.0), torch.arange(32.0) + 1)


def test_a_tensor_and_its_conjugate_are_two_although_they_share_their_memory(tmp_path: Path) -> None:
    path = tmp_path / "0-0.slot"
    path.write_bytes(pack_head(EMPTY) * 2 + bytes(1 << 16))
    state = {"values": VALUES, "conjugate": VALUES.conj(), "negative": torch._neg_view(VALUES)}
    shard = ShardReader().read(state)
    slot = Slot(str(path))
    slot.begin(Author(b"j" * 16, Moment(1, 0, 5), 0, 1), shard)
    samples = slot.copy(shard, lambda: True)
    saved = {entry.name: view.tolist() for entry, view in zip(shard.layout.entries, slot._targets(shard), strict=True)}
    slot.close()
    assert saved == {name: one.tolist() for name, one in state.items()}
    # The source's memory is compared with the copy: not where a flag says that the values are others.
    first = next(entry for entry in shard.layout.entries if entry.name == "values")
    assert all(first.start <= one.offset < first.start + first.num_bytes for one in samples)


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:.*quantize")
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.eye(4).to_sparse(), "sparse_coo"),
        (lambda: torch.eye(4).to_sparse_csr(), "sparse_csr"),
        (lambda: torch.quantize_per_tensor(torch.arange(4.0), 0.1, 0, torch.qint8), "qint8"),
        (lambda: torch.empty(4, device="meta"), "meta"),
        # Nothing can be copied into such a one: each load would fail.
        (lambda: torch.ones(2, 1).expand(2, 3), "Tensor that was expanded: clone"),
    ],
)
def test_a_tensor_that_cannot_be_copied_by_its_bytes_is_refused_by_name(
    make: Callable[[], torch.Tensor], kind: str
) -> None:
    with pytest.raises(TypeError, match=f"table: want a dense tensor.*{kind}"):
        ShardReader().read({"table": make()})
