"""Pure decisions and the protocol of Unbroken.

    coordinator       the state machine of one job
    torchrun_rounds   the rounds of a torchrun
    preflight         which hosts and links are broken, before a job begins
    recovery          the ladder of rungs, budgets, history
    ranks             who is which rank
    pod               what is said within a pod
    protocol          what programs send one another: messages, a job's settings, bounds, JSON
    vocabulary        the words and small values that all of them share
    conventions       what programs do alike at their edges; nothing above uses it

Standard library only, because this package is imported inside the user's training process. No clock, no randomness,
no I/O, no asyncio: time and seeds come in as arguments. Anything that touches a socket or a process belongs elsewhere.
Runs on Python 3.10 and newer.
"""

__version__ = "0.1.0"
