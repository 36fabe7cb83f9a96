"""spec.health: what is looked at in the pods, and what becomes of what is found."""

from typing import Annotated

from pydantic import Field

from unbroken_core.settings import HealthMode
from unbroken_operator.api.model_base import Model

MAX_PATHS = 8


class Health(Model):
    """The watch on devices, links and nodes."""

    mode: HealthMode = HealthMode.OBSERVE
    """Off: nothing is looked at. Observe: what is found is told, and changes nothing. Act: ranks move from what is
    broken to a ready spare."""
    storage: Annotated[
        tuple[Annotated[str, Field(pattern="^/[^:]*$", max_length=120)], ...], Field(max_length=MAX_PATHS)
    ] = ()
    """Absolute paths in the trainer container that are looked at as well: whether they answer, can be written and have
    room. Nothing is written there."""
