"""What torchrun loads of Unbroken: a rendezvous backend and the way logs are kept, both named `unbroken`.

`torchrun --rdzv-backend=unbroken --rdzv-endpoint=HOST:PORT --logs-specs=unbroken ...`; see docs/torchrun.md.

torch asks for the backend in every process that imports its elastic part, also in training processes: until one is
made, nothing is imported here. Nothing else imports this package; `unbroken.rounds` has what needs no torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousParameters


def _create_handler(parameters: "RendezvousParameters") -> "RendezvousHandler":
    from unbroken.torchrun_plugin.handler import create_handler  # noqa: PLC0415 - only who uses it pays for it

    return create_handler(parameters)


def rendezvous_handler() -> "Callable[[RendezvousParameters], RendezvousHandler]":
    """Return what makes a handler; the entry point of torch's group `torchrun.handlers`. The same one each time."""
    return _create_handler
