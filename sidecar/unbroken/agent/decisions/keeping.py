"""What a pod's keeper is told, and what it asks of the rendezvous. Pure.

    Welcome(copies) ──Copying──> keeper ──CertificateRequest──> rendezvous ──Certificate, Buddies──> keeper

Level, not edge: a new keeper is told all of it anew, and each connection asks for a certificate anew: after a restart
with another key of the job the rendezvous signs with another one.
"""

from unbroken.agent.decisions.events import Action, KeeperAsked, KeeperStarted, SendToKeeper, SendToRendezvous
from unbroken.agent.decisions.instructions import Instructions
from unbroken_core.pod.memory_messages import Copying, OfAgent, Restarting, Unranked
from unbroken_core.protocol.messages import Buddies, Certificate, CertificateRequest


class Keeping:
    """One pod's keeper, as its agent knows it."""

    def __init__(self) -> None:
        self._copying: Copying | None = None
        """None until the rendezvous has said so."""
        self._request: CertificateRequest | None = None
        """Of the keeper that runs."""
        self._is_asked = False
        """Whether this connection has asked for the certificate."""
        self._certificate: Certificate | None = None
        self._buddies: Buddies | None = None
        self._told: dict[type, OfAgent] = {}
        """What the keeper that runs was told last, of each kind."""
        self._is_running = False

    def note_keeper(self, event: KeeperStarted | KeeperAsked) -> None:
        """A new keeper knows nothing; it asks for a certificate of its own key."""
        if isinstance(event, KeeperStarted):
            self._is_running, self._told = True, {}
            self._request, self._certificate, self._is_asked = None, None, False
        elif event.request != self._request:
            self._request, self._certificate, self._is_asked = event.request, None, False

    def welcome(self, copies: int) -> None:
        """The rendezvous has accepted this agent, and says on how many other pods checkpoints are copied."""
        self._copying, self._is_asked = Copying(copies), False

    def receive(self, message: Certificate | Buddies) -> None:
        """Take the newest of each."""
        if isinstance(message, Buddies):
            self._buddies = message
        else:
            self._certificate = message

    def settle(self, is_accepted: bool, restart: Restarting | Unranked | None = None) -> list[Action]:
        """Return what is due. `restart`: how far it is for this pod, if that matters to copies."""
        if self._copying is None or not self._is_running:
            return []
        actions: list[Action] = []
        if self._copying.copies > 0 and is_accepted and self._request is not None and not self._is_asked:
            self._is_asked = True
            actions.append(SendToRendezvous(self._request))
        for message in (restart if self._copying.copies > 0 else None, self._copying, self._certificate, self._buddies):
            if message is None or (self._copying.copies == 0 and type(message) not in self._told):
                continue
            if self._told.get(type(message)) != message:
                self._told[type(message)] = message
                actions.append(SendToKeeper(message))
        return actions


def restart_of(instructions: Instructions) -> Restarting | Unranked | None:
    """Return what a keeper has to know of a restart that goes on, if any; it sees when its own ranks restore."""
    plan = instructions.plan
    if plan is not None and instructions.is_plan_in_force:
        return Unranked(plan.iteration) if all(part.rank is None for part in plan.ranks) else None
    return Restarting(instructions.interrupted) if instructions.interrupted >= 0 else None
