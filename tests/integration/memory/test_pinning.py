"""Which steps a keeper says that it keeps from being overwritten: none that it does not."""

import threading
from collections.abc import Iterator

import pytest
from tests.waiting import LIMIT_S, wait_until

from unbroken.keeper.counting import Counting
from unbroken.keeper.pinning import Order, Pins
from unbroken.keeper.replication import Replication
from unbroken.keeper.telling import Telling
from unbroken_core.pod.memory_messages import Copying
from unbroken_core.protocol.messages import Buddies

from .copying import CopyPod, make_pods


@pytest.fixture
def pod() -> Iterator[CopyPod]:
    (made,) = make_pods("owner")
    yield made
    made.close()


def test_a_step_that_was_pinned_for_too_long_is_told_as_pinned_no_more(pod: CopyPod) -> None:
    pod.save(1)
    pins, is_over = Pins(pod.arena, hold_s=0.2), threading.Event()
    pins.pin(None, (0, 1, 1), is_over.set)
    assert is_over.wait(LIMIT_S)
    assert not pins.is_sure((0, 1, 1))
    pins.pin((0, 1, 1), None)
    assert pins.is_sure((0, 1, 1))


def test_what_was_looked_up_before_an_order_is_not_told_after_it(pod: CopyPod, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that digests may get no processor between its look and its telling."""
    pod.save(1)
    pod.save(4)
    first, second = (0, 1, 1, 4), (0, 1, 4, 4)
    telling = Telling(pod.arena, pod.root)
    replication = Replication(pod.arena._config, pod.arena, telling, Counting(pod.limit_bytes))
    replication.obey(Copying(1), lambda _request: None)
    replication.obey(Buddies(1, protected=first, next_protected=second), lambda _request: None)
    wait_until(lambda: telling.held().pinned == (first, second), "both pinned", describe=lambda: str(telling.held()))
    has_looked, go_on, is_sure = threading.Event(), threading.Event(), Pins.is_sure

    def look_slowly(self: Pins, order: Order) -> bool:
        found = is_sure(self, order)
        if threading.current_thread() is digesting and order == second[:3]:
            has_looked.set()
            assert go_on.wait(LIMIT_S)
        return found

    monkeypatch.setattr(Pins, "is_sure", look_slowly)
    digesting = threading.Thread(target=replication.note)
    obeying = threading.Thread(
        target=replication.obey, args=(Buddies(1, protected=second), lambda _request: None), daemon=True
    )
    digesting.start()
    try:
        assert has_looked.wait(LIMIT_S)
        obeying.start()
        # It either waits for the other thread, or has told what is right before it.
        obeying.join(1.0)
    finally:
        go_on.set()
        digesting.join(LIMIT_S)
    obeying.join(LIMIT_S)
    assert telling.held().pinned == (second,)
    assert replication._listener is not None
    replication._listener.close()
