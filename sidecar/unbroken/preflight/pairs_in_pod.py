"""Tests of a pod of a job with other pods, as its launcher orders them. Each runs in a child that can be killed.

    launcher ──PairOrder──> here ──fork──> the pair's test <──gloo, NCCL──> the same in the other pod
             <──PairState──

Partners meet at the store of one of them, which is a child as well: torch's, which trusts whoever reaches its port.
"""

import functools
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch does not export it by name

from unbroken.preflight.forked import EndedError, Forked, Tell
from unbroken.preflight.meeting import MeetingPlace
from unbroken.preflight.member import choose_interface
from unbroken.preflight.pair_trial import try_pair
from unbroken_core.protocol import wire
from unbroken_core.protocol.messages import PairOrder, PairState
from unbroken_core.vocabulary.errors import WireError

_OPEN_S = 30.0
_SLACK_S = 2.0
"""Beyond the limit of a test, which ends what it has started itself where it can."""
_MAX_LINE_BYTES = 64 << 10
_MAX_WHY = 300


class _Orders:
    """What the launcher says."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._unread = b""

    def fileno(self) -> int:
        """Return what to wait for."""
        return self._descriptor

    def next(self) -> PairOrder | None:
        """Return the newest order, once there is one; None when there will be none."""
        while b"\n" not in self._unread:
            data = os.read(self._descriptor, 1 << 16)
            self._unread += data
            if not data or len(self._unread) > _MAX_LINE_BYTES:
                return None
        *lines, self._unread = self._unread.split(b"\n")
        try:
            order: PairOrder = wire.decode(lines[-1], PairOrder)
        except WireError:
            return None
        return order


def take_orders(descriptor: int, host: str, gpus: int, tell: Callable[[PairState], None]) -> None:
    """Test with whom the launcher says, until it hangs up. `host` is this pod's address."""
    store = Forked(functools.partial(_serve, host))
    try:
        port = int(store.read(time.monotonic() + _OPEN_S))
        tell(PairState(port, gpus=gpus))
        orders = _Orders(descriptor)
        order = orders.next()
        while order is not None:
            answer = _answer(order, orders)
            if answer is not None:
                tell(answer)
            order = orders.next()
    except (TimeoutError, EndedError):
        return
    finally:
        store.end()


def _answer(order: PairOrder, orders: _Orders) -> PairState | None:
    """Return how a test went; None where another order has come meanwhile, or there will be none."""
    test = Forked(functools.partial(_test, order))
    until_s = time.monotonic() + order.within_s + _SLACK_S
    why = f"no end within {order.within_s:g} s"
    try:
        ends = [test.fileno(), orders.fileno()]
        ready, _, _ = select.select(ends, [], [], max(until_s - time.monotonic(), 0.0))
        if orders.fileno() in ready and test.fileno() not in ready:
            return None
        found = test.read(until_s)
    except TimeoutError:
        return _state(order, False, why)
    except EndedError as error:
        return _state(order, None if error.number == signal.SIGKILL else False, f"the process of the test {error}")
    finally:
        test.end()
    why = str(found["why"])
    return _state(order, True if found["passed"] else None if _is_no_sign(order, why) else False, why)


def _is_no_sign(order: PairOrder, why: str) -> bool:
    """Return whether a failure says nothing of this pod and the way to the other one."""
    is_own_store = order.side == 0 and "the leader's store" in why
    # Another process has the memory; Linux kills where it is short.
    return is_own_store or "out of memory" in why.lower() or "SIGKILL" in why


def _state(order: PairOrder, has_passed: bool | None, why: str) -> PairState:
    return PairState(0, "", 0, order.term, order.number, has_passed, why[:_MAX_WHY])


def _test(order: PairOrder, tell: Tell) -> None:
    choose_interface(order.host)
    place = MeetingPlace(order.host, order.port, f"{order.term}.{order.number}")
    tell(try_pair(place, {"meeting": "pair", "side": order.side, "gpus": order.gpus}, order.within_s))


def _serve(host: str, tell: Tell) -> None:
    """Be the store at which partners meet this pod, until it is ended."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        port = listener.getsockname()[1]
        store = TCPStore(
            host,
            port,
            is_master=True,
            timeout=timedelta(seconds=_OPEN_S),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    tell(store.port)
    while True:
        signal.pause()
