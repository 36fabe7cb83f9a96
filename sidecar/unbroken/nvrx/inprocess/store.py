"""The extension's stores: torch's own, with methods that send states and keys between ranks.

The wrapper polls no store. These are for `store_factory`, of which only host and port count, and for scripts that use
one by themselves.
"""

import dataclasses
import datetime
import json
import os
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from unbroken.inprocess.assignment.roll_call import refuse_other_than_state
from unbroken.inprocess.state import FrozenState, Mode, State

__all__ = ["FileStore", "PrefixStore", "StoreMixin", "TCPStore"]


class StoreMixin:
    """Sends states and keys by rank; needs `set`, `get` and `multi_get` of a store."""

    STATE = "state_{rank}"
    KEY = "key_{rank}"
    STORE_PREFIX = "_inprocess_{iteration}"

    @property
    def critical_ranks(self) -> tuple[int, ...]:
        """Ranks without which the store is gone."""
        return ()

    def send_state(self, state: State | FrozenState, rank: int) -> None:
        """Publish the state of a rank, without its exception. Raises TypeError for what is no state."""
        refuse_other_than_state(state)
        fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
        sent = json.dumps({**fields, "mode": state.mode.name, "fn_exception": None})
        self._store().set(self.STATE.format(rank=rank), sent)

    def send_key(self, key: Any, rank: int) -> None:
        """Publish the key of a rank: anything that JSON can hold."""
        self._store().set(self.KEY.format(rank=rank), json.dumps(key))

    def get_states(self, ranks: Iterable[int]) -> list[State]:
        """Return the states of these ranks; waits for them."""
        found = [json.loads(text) for text in self._of_ranks(self.STATE, ranks)]
        return [State(**{**fields, "mode": Mode[fields["mode"]]}) for fields in found]

    def get_keys(self, ranks: Iterable[int]) -> list[Any]:
        """Return the keys of these ranks; waits for them."""
        return [json.loads(text) for text in self._of_ranks(self.KEY, ranks)]

    def _of_ranks(self, name: str, ranks: Iterable[int]) -> list[bytes]:
        found: list[bytes] = self._store().multi_get([name.format(rank=rank) for rank in ranks])
        return found

    def _store(self) -> Any:
        """Return this object as the store that it is as well."""
        return self


class TCPStore(dist.TCPStore, StoreMixin):  # type: ignore[name-defined, misc] # torch does not export it by name
    """A store of which rank 0 is the server."""

    TCP_STORE_HOST_RANK = 0

    def __init__(  # noqa: PLR0917 - the extension's order
        self,
        host_name: str | None = None,
        port: int | None = None,
        world_size: int | None = None,
        timeout: datetime.timedelta = datetime.timedelta(seconds=300),
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        use_libuv: bool = True,
    ) -> None:
        """What is None comes from MASTER_ADDR, MASTER_PORT and WORLD_SIZE; raises KeyError without them."""
        super().__init__(
            host_name=os.environ["MASTER_ADDR"] if host_name is None else host_name,
            port=int(os.environ["MASTER_PORT"]) if port is None else port,
            world_size=int(os.environ["WORLD_SIZE"]) if world_size is None else world_size,
            is_master=int(os.environ["RANK"]) == self.TCP_STORE_HOST_RANK,
            timeout=timeout,
            wait_for_workers=wait_for_workers,
            multi_tenant=multi_tenant,
            use_libuv=use_libuv,
        )

    @property
    def critical_ranks(self) -> tuple[int, ...]:
        """Return the rank that is the server."""
        return (self.TCP_STORE_HOST_RANK,)


class PrefixStore(dist.PrefixStore, StoreMixin):  # type: ignore[name-defined, misc] # torch does not export it by name
    """The part of a store that belongs to one iteration."""

    def __init__(self, iteration: int, store: Any) -> None:
        self.base_store = store
        super().__init__(self.STORE_PREFIX.format(iteration=iteration), store)


class FileStore(dist.FileStore, StoreMixin):  # type: ignore[name-defined, misc] # torch does not export it by name
    """A store in a file."""
