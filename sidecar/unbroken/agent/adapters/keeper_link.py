"""What the pod's keeper has, for the rendezvous: told by the keeper, and as the heads of the slots say right now."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from unbroken.keeper.digests import read_slot_head
from unbroken.keeper.telling import arena_name, shard_of
from unbroken_core import wire
from unbroken_core.checkpoints import Held, Holding
from unbroken_core.errors import WireError
from unbroken_core.pod.memory_messages import KEEPER_SOCKET, MAX_LINE_BYTES, Holds, Watch
from unbroken_core.pod.memory_slots import NUM_SLOTS, SlotState, slot_name

logger = logging.getLogger(__name__)

_RETRY_S = 0.2
_ANSWER_S = 60.0
"""A keeper answers after ten seconds even without news, unless it gets no processor."""


class KeeperLink:
    """All of it in the agent's event loop."""

    def __init__(self, directory: Path, root: Path, pod_uid: str, ranks_per_pod: int) -> None:
        self._socket = directory / KEEPER_SOCKET
        self._root, self._uid = root, pod_uid
        self._slots = [
            root / pod_uid / slot_name(local_rank, index)
            for local_rank in range(ranks_per_pod)
            for index in range(NUM_SLOTS)
        ]
        self._told: Held | None = None

    async def run(self, emit: Callable[[Held], None]) -> None:
        """Ask the keeper for news again and again, and connect again whenever it ends."""
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(str(self._socket), limit=MAX_LINE_BYTES)
                try:
                    await self._follow(reader, writer, emit)
                finally:
                    writer.close()
            except (OSError, WireError, ValueError, asyncio.IncompleteReadError, asyncio.TimeoutError) as error:
                logger.debug("keeper does not tell: error=%s", error)
            await asyncio.sleep(_RETRY_S)

    async def _follow(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, emit: Callable[[Held], None]
    ) -> None:
        version = 0
        while True:
            writer.write(wire.encode(Watch(version)).encode() + b"\n")
            line = await asyncio.wait_for(reader.readuntil(b"\n"), _ANSWER_S)
            answer: Holds = wire.decode(line, Holds)
            version, self._told = answer.version, answer.held
            emit(self.look())

    def look(self) -> Held:
        """Return what there is at this moment: a keeper may be slow, and a plan may be made at once."""
        told = self._told or Held(arena_name(self._root))
        known = {
            (one.term, one.iteration, one.step, one.world_size, shard[:2]): shard[2]
            for one in told.holdings
            if one.place == self._uid
            for shard in one.shards
        }
        shards: dict[tuple[int, int, int, int], dict[int, tuple[int, str, str]]] = {}
        for path in self._slots:
            head = read_slot_head(path)
            if head is None or head.state is not SlotState.SEALED:
                continue
            moment = head.moment
            key = (moment.term, moment.iteration, moment.step, head.world_size)
            shard = shard_of(head, "")
            shards.setdefault(key, {})[head.rank] = (*shard[:2], known.get((*key, shard[:2]), ""))
        own = [Holding(self._uid, *key, tuple(of_key.values())) for key, of_key in shards.items()]
        others = [one for one in told.holdings if one.place != self._uid]
        return replace(told, holdings=(*own, *others))
