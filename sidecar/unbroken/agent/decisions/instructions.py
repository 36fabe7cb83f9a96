"""What the rendezvous wants of this pod: the newest message of each kind. Pure."""

from dataclasses import dataclass

from unbroken_core.protocol.messages import Consult, Finish, Halt, Interrupt, Plan
from unbroken_core.vocabulary.errors import assert_never


@dataclass
class Instructions:
    """The newest message of each kind, and which iterations are over."""

    term: int = 0
    interrupted: int = -1
    """Highest iteration that is over."""
    plan: Plan | None = None
    halt: Halt | None = None
    """The newest order to wait after a step."""
    interrupt: Interrupt | None = None
    consult: Consult | None = None
    """The newest question about ranks, for one of the workers."""
    finish: Finish | None = None
    closed: int = -1
    """Highest iteration that was over when the rendezvous accepted this agent."""

    def note(self, message: Halt | Consult | Finish) -> None:
        """Keep the message until the next of its kind."""
        match message:
            case Halt():
                self.halt = message
            case Consult():
                self.consult = message
            case Finish():
                self.finish = message
            case _:
                assert_never(message)

    @property
    def over(self) -> int:
        """Highest iteration in which no worker may stay: interrupted, or older than the plan."""
        return max(self.interrupted, self.plan.iteration - 1 if self.plan is not None else -1)

    @property
    def is_plan_in_force(self) -> bool:
        """Whether workers may be in the plan."""
        return self.plan is not None and self.plan.iteration > self.interrupted

    @property
    def has_ranks(self) -> bool:
        """Whether this pod has ranks in the plan in force."""
        return (
            self.plan is not None and self.is_plan_in_force and any(part.rank is not None for part in self.plan.ranks)
        )

    @property
    def is_plan_open(self) -> bool:
        """Whether the rendezvous would still let workers enter the plan."""
        return self.plan is not None and self.plan.iteration > self.closed
