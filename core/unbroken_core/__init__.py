"""Pure decisions and words of Unbroken: topology, assignment, coordinator, ladder, liveness, messages.

Standard library only, because this package is imported inside the user's training process. No clock, no randomness,
no I/O, no asyncio: time and seeds come in as arguments. Anything that touches a socket or a process belongs elsewhere.
Runs on Python 3.10 and newer.
"""

__version__ = "0.1.0"
