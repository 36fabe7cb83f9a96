"""States as text, whose shape is no part of a checkpoint's."""

import base64
import io
import json
from typing import Any

import torch

from unbroken.memory.shard import refuse_unreadable


def write(state: dict[str, Any]) -> str:
    """Return text. Raises TypeError for what could not be read without running code."""
    refuse_unreadable(state)
    file = io.BytesIO()
    torch.save(state, file)
    return base64.b64encode(file.getvalue()).decode()


def read(text: str) -> dict[str, Any]:
    """Return what was written."""
    file = io.BytesIO(base64.b64decode(text))
    # As frameworks read their own files: another rank may have saved it, on a device that this one has not.
    state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return state


def for_json(state: dict[str, Any]) -> dict[str, Any] | str:
    """Return what `from_json` makes the state of again, once JSON has had it. Raises TypeError as `write` does.

    JSON alone has no numbers as keys, no tuples and no tensors.
    """
    try:
        is_same = bool(json.loads(json.dumps(state)) == state)
    except (TypeError, ValueError, RuntimeError):
        is_same = False
    return state if is_same else write(state)


def from_json(kept: dict[str, Any] | str) -> dict[str, Any]:
    """Return the state."""
    return read(kept) if isinstance(kept, str) else kept
