"""Errors of the operator's adapters; one class per reaction.

UnbrokenError
├── KubeError
│   ├── KubeNotFound      what was asked for does not exist (404), or is another object than expected (uid)
│   ├── KubeConflict      it exists already, or changed meanwhile (409)
│   ├── KubeRefused       the API server will not do it however often it is asked (400, 401, 403, 405, 413, 422)
│   ├── KubeGone          the watch's place in history is gone: list again (410)
│   └── KubeUnavailable   not now (429, 5xx, no connection, time-out): try again later
│       ├── NotLeading    another operator may hold the lease: nothing was asked, the lease says so for all jobs
│       └── KubeNotServed a path that the API server does not know (404 without a Status): it starts, or lacks a CRD
└── RendezvousUnreachable the rendezvous did not answer as it should: a normal state, try again later
    └── ReportRefused     it answered with what a job of its size has no reason to say: say so, try again seldom
"""

from unbroken_core.vocabulary.errors import UnbrokenError


class KubeError(UnbrokenError):
    """The API server did not do what it was asked."""


class KubeNotFound(KubeError):
    """There is no such object."""


class KubeConflict(KubeError):
    """The object exists already, or is another one than expected."""


class KubeRefused(KubeError):
    """Refused for good."""


class KubeGone(KubeError):
    """The resource version is too old."""


class KubeUnavailable(KubeError):
    """Not now. `retry_after_s` is what the server asked for, None when it did not."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotLeading(KubeUnavailable):
    """Nobody may act now but who holds the lease."""

    def __init__(self) -> None:
        super().__init__("the lease cannot be renewed, another operator may hold it", retry_after_s=1.0)


class KubeNotServed(KubeUnavailable):
    """Nothing is known at this path, which says nothing about objects."""


class RendezvousUnreachable(UnbrokenError):
    """The rendezvous did not answer, or not in our language."""


class ReportRefused(RendezvousUnreachable):
    """The report is too large, or out of bounds. `num_bytes` were read of it."""

    def __init__(self, message: str, num_bytes: int = 0) -> None:
        super().__init__(message)
        self.num_bytes = num_bytes
