"""Workers that wait for the fork server, without one."""

import pytest

from unbroken.launch.forking import Forking, ServerPhase
from unbroken.launch.python_command import PythonCommand


@pytest.fixture
def forking() -> Forking:
    command = PythonCommand(("python3", "train.py"), (), "train.py", is_module=False, arguments=())
    return Forking(command, ("torch",), {}, lambda: None, lambda _reason: None)


@pytest.mark.parametrize("phase", [ServerPhase.READY, ServerPhase.GONE, ServerPhase.OFF])
def test_worker_whose_order_was_not_given_yet_is_due_at_once(forking: Forking, phase: ServerPhase) -> None:
    """Else its launcher would sleep until something else happens, a minute in a spare pod where nothing does."""
    forking._phase = ServerPhase.READY
    assert forking.ask(0, {}, now_s=5.0)
    forking._phase = phase
    assert forking.next_deadline_s == 0.0


def test_worker_that_waits_for_the_imports_is_not_due_before_their_limit(forking: Forking) -> None:
    forking._phase, forking._overdue_at_s = ServerPhase.IMPORTING, 125.0
    assert forking.ask(0, {}, now_s=5.0)
    assert forking.next_deadline_s == 125.0
