"""What a pod's keeper is told, and what its agent asks for it: all that holds, anew to each keeper and connection."""

from pathlib import Path

from unbroken.agent.adapters.keeper_view import KeeperView
from unbroken.agent.decisions.events import KeeperAsked, KeeperStarted, SendToKeeper, SendToRendezvous
from unbroken.agent.decisions.keeping import Keeping
from unbroken_core.pod.memory_messages import Copying, Restarting
from unbroken_core.protocol.messages import Buddies, Certificate, CertificateRequest
from unbroken_core.vocabulary.checkpoints import Held, Peer

REQUEST = CertificateRequest("one")
CERTIFICATE = Certificate(1, "certificate", "authority")
BUDDIES = Buddies(1, (Peer("b", "h", 1),), ("c",))


def started() -> Keeping:
    keeping = Keeping()
    keeping.note_keeper(KeeperStarted())
    return keeping


def test_a_job_without_copies_tells_its_keeper_so_and_asks_for_nothing() -> None:
    keeping = started()
    assert keeping.settle(True) == []
    keeping.welcome(0)
    keeping.note_keeper(KeeperAsked(REQUEST))
    assert keeping.settle(True) == []


def test_a_keeper_asks_over_its_agent_and_is_told_the_answer_and_who_its_buddies_are_once() -> None:
    keeping = started()
    keeping.welcome(1)
    assert keeping.settle(True) == [SendToKeeper(Copying(1))]
    keeping.note_keeper(KeeperAsked(REQUEST))
    assert keeping.settle(False) == []
    assert keeping.settle(True) == [SendToRendezvous(REQUEST)]
    keeping.receive(CERTIFICATE)
    keeping.receive(BUDDIES)
    assert keeping.settle(True) == [SendToKeeper(CERTIFICATE), SendToKeeper(BUDDIES)]
    assert keeping.settle(True) == []


def test_a_new_keeper_is_told_all_anew_and_its_key_needs_a_certificate_of_its_own() -> None:
    keeping = started()
    keeping.welcome(1)
    keeping.note_keeper(KeeperAsked(REQUEST))
    keeping.receive(CERTIFICATE)
    keeping.receive(BUDDIES)
    keeping.settle(True)
    keeping.note_keeper(KeeperStarted())
    # The certificate is that of a key which is gone.
    assert keeping.settle(True) == [SendToKeeper(Copying(1)), SendToKeeper(BUDDIES)]
    other = CertificateRequest("two")
    keeping.note_keeper(KeeperAsked(other))
    assert keeping.settle(True) == [SendToRendezvous(other)]


def test_each_connection_asks_anew_and_the_same_answer_is_told_once() -> None:
    keeping = started()
    keeping.welcome(1)
    keeping.note_keeper(KeeperAsked(REQUEST))
    keeping.receive(CERTIFICATE)
    keeping.settle(True)
    keeping.welcome(1)
    assert keeping.settle(True) == [SendToRendezvous(REQUEST)]
    keeping.receive(CERTIFICATE)
    assert keeping.settle(True) == []
    renewed = Certificate(1, "another", "authority")
    keeping.receive(renewed)
    assert keeping.settle(True) == [SendToKeeper(renewed)]


def test_a_keeper_that_is_told_to_copy_no_more_learns_it() -> None:
    keeping = started()
    keeping.welcome(1)
    keeping.settle(True)
    keeping.welcome(0)
    assert keeping.settle(True) == [SendToKeeper(Copying(0))]


def test_a_keeper_that_is_started_again_stays_where_others_know_it(tmp_path: Path) -> None:
    """Else its pod would for a moment be none that keeps copies, and all buddies would change."""
    view = KeeperView(tmp_path, "uid", 1, "host")
    assert (view.look().host, view.look().port) == ("", 0)
    view.note(Held("", port=7))
    assert (view.look().host, view.look().port) == ("host", 7)
    view.note(Held(""))
    assert (view.look().host, view.look().port) == ("host", 7)
    view.note(Held("", port=8))
    assert view.port == 8


def test_a_keeper_with_copies_is_told_once_of_each_iteration_that_is_over_until_a_plan_follows() -> None:
    keeping = started()
    keeping.welcome(1)
    keeping.settle(True)
    assert keeping.settle(True, Restarting(3)) == [SendToKeeper(Restarting(3))]
    assert keeping.settle(True, Restarting(3)) == []
    assert keeping.settle(True) == []
    assert keeping.settle(False, Restarting(4)) == [SendToKeeper(Restarting(4))]
    # One that was killed meanwhile finds the restart still going on, or over.
    keeping.note_keeper(KeeperStarted())
    assert keeping.settle(True, Restarting(4)) == [SendToKeeper(Restarting(4)), SendToKeeper(Copying(1))]
    keeping.note_keeper(KeeperStarted())
    assert keeping.settle(True) == [SendToKeeper(Copying(1))]


def test_a_keeper_without_copies_is_told_of_no_restart() -> None:
    keeping = started()
    keeping.welcome(0)
    assert keeping.settle(True, Restarting(3)) == []
