"""One domain and what it knows of the workers below it."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

from unbroken_core.vocabulary.layers import Layer

_order: Callable[["Domain"], Any] = attrgetter("order")

# Shared by all innermost domains, which have no children: thousands of empty lists would burden the garbage collector.
_NO_DOMAINS: "list[Domain]" = []
_NO_NAMES: "dict[str, Domain]" = {}


class Domain:
    """A node of the tree. The innermost ones hold workers: consecutive indices from `first`.

    `adjust` keeps the counts of a domain and of all above it; nothing else may write them.
    """

    __slots__ = (
        "active",
        "by_name",
        "capacity",
        "children",
        "depth",
        "first",
        "healthy",
        "is_barred",
        "key",
        "maximum",
        "minimum",
        "name",
        "order",
        "parent",
        "size",
        "spare",
        "spare_used",
        "spare_whole",
    )

    def __init__(
        self, name: str, order: Any, parent: "Domain | None", layer: Layer, is_innermost: bool = False
    ) -> None:
        self.name = name
        self.order = order
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.minimum = layer.min_ranks
        self.maximum = layer.maximum
        self.children: list[Domain] = _NO_DOMAINS if is_innermost else []
        """In tree order; empty in an innermost domain."""
        self.by_name: dict[str, Domain] = _NO_NAMES if is_innermost else {}
        self.key = ""
        """Key of the place; "" above the innermost layer."""
        self.first = 0
        self.size = 0
        """Workers that it holds itself: 0 above the innermost layer."""
        self.healthy = 0
        """Healthy workers below, without those of domains that are barred."""
        self.active = 0
        """Workers below that hold a rank."""
        self.spare = 0
        """Sum of the children's capacities; of an innermost domain: its spare workers."""
        self.capacity = 0
        """How many spare workers below could become active at once, as far as the limits here and below allow it."""
        self.is_barred = False
        """Fewer healthy workers than the layer's minimum: none of them may be active."""
        self.spare_used: list[Domain] = _NO_DOMAINS if is_innermost else []
        """Children with capacity that have active workers, in tree order."""
        self.spare_whole: list[Domain] = _NO_DOMAINS if is_innermost else []
        """Children with capacity and without active workers, in tree order."""

    @property
    def is_gone(self) -> bool:
        """Whether no worker below may be active."""
        return self.is_barred or self.healthy == 0

    @property
    def path(self) -> tuple[str, ...]:
        """Names from the outermost layer below the root to this domain."""
        names: list[str] = []
        node: Domain | None = self
        while node is not None and node.parent is not None:
            names.append(node.name)
            node = node.parent
        return tuple(reversed(names))

    def ancestor(self, depth: int) -> "Domain":
        """Return the domain of this depth, between the root (0) and this one."""
        node = self
        while node.depth > depth and node.parent is not None:
            node = node.parent
        return node

    def innermost(self) -> Iterator["Domain"]:
        """Yield the innermost domains below, in tree order; itself when it is one."""
        if not self.children:
            yield self
        for child in self.children:
            yield from child.innermost()

    def has_room(self, num_ranks: int) -> bool:
        """Whether so many more ranks stay within the limits of this domain and of all above it."""
        node: Domain | None = self
        while node is not None:
            if node.maximum - node.active < num_ranks:
                return False
            node = node.parent
        return True

    def is_usable(self) -> bool:
        """Whether neither this domain nor one above it is barred."""
        node: Domain | None = self
        while node is not None:
            if node.is_barred:
                return False
            node = node.parent
        return True

    def adjust(self, healthy: int, active: int, spare: int, suspects: dict["Domain", None]) -> None:
        """Add to the counts here and pass the consequences up.

        Domains that become barred, or that have more active workers than allowed, are added to `suspects`.
        """
        node: Domain | None = self
        while node is not None and (healthy or active or spare):
            healthy, spare = node._settle(healthy, active, spare, suspects)
            node = node.parent

    def _settle(self, healthy: int, active: int, spare: int, suspects: dict["Domain", None]) -> tuple[int, int]:
        """Update this domain alone; return what changes for its parent: (healthy, spare)."""
        standing = 0 if self.is_barred else self.healthy
        had_active, had_capacity = self.active, self.capacity
        self.healthy += healthy
        self.active += active
        self.spare += spare
        self.refresh()
        if self.is_barred or self.active > self.maximum:
            suspects[self] = None
        if self.parent is not None:
            self.parent.relist(self, had_active, had_capacity)
        return (0 if self.is_barred else self.healthy) - standing, self.capacity - had_capacity

    def refresh(self) -> None:
        """Derive `is_barred` and `capacity` from the counts."""
        self.is_barred = self.healthy < self.minimum
        room = self.maximum - self.active
        capacity = self.spare if self.spare < room else room
        self.capacity = 0 if self.is_barred or capacity < 0 else capacity

    def relist(self, child: "Domain", had_active: int, had_capacity: int) -> None:
        """Keep the lists of children with spares after a child's counts changed."""
        old = (self.spare_used if had_active else self.spare_whole) if had_capacity else None
        new = (self.spare_used if child.active else self.spare_whole) if child.capacity else None
        if old is new:
            return
        if old is not None:
            del old[bisect_left(old, child.order, key=_order)]
        if new is not None:
            insort(new, child, key=_order)

    def attach(self, child: "Domain", suspects: dict["Domain", None]) -> None:
        """Add a child, in order, and count what it has."""
        insort(self.children, child, key=_order)
        self.by_name[child.name] = child
        if child.capacity:
            insort(self.spare_used if child.active else self.spare_whole, child, key=_order)
        standing = 0 if child.is_barred else child.healthy
        self.adjust(standing, child.active, child.capacity, suspects)

    def detach(self, child: "Domain", suspects: dict["Domain", None]) -> None:
        """Take a child out, and all that it has."""
        self.children.remove(child)
        del self.by_name[child.name]
        if child.capacity:
            (self.spare_used if child.active else self.spare_whole).remove(child)
        standing = 0 if child.is_barred else child.healthy
        self.adjust(-standing, -child.active, -child.capacity, suspects)
