"""What the pod's keeper has, for the rendezvous: told by the keeper, and as the heads of the slots say right now."""

from dataclasses import replace
from pathlib import Path

from unbroken.keeper.digests import read_slot_head
from unbroken.keeper.telling import arena_name, shard_of
from unbroken_core.pod.memory_slots import NUM_SLOTS, SlotState, slot_name
from unbroken_core.vocabulary.checkpoints import Held, Holding


class KeeperView:
    """What a keeper has told, brought up to date whenever it is looked at."""

    def __init__(self, root: Path, pod_uid: str, ranks_per_pod: int, host: str) -> None:
        self._root, self._uid, self._host = root, pod_uid, host
        self._slots = [
            root / pod_uid / slot_name(local_rank, index)
            for local_rank in range(ranks_per_pod)
            for index in range(NUM_SLOTS)
        ]
        self._told: Held | None = None

    @property
    def port(self) -> int:
        """Where other keepers reach this one; 0: nowhere."""
        return 0 if self._told is None else self._told.port

    def note(self, held: Held) -> None:
        """The keeper has told this. One that was started again will listen where the one before it did."""
        self._told = held if held.port else replace(held, port=self.port)

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
        return replace(told, holdings=(*own, *others), host=self._host if told.port else "")
