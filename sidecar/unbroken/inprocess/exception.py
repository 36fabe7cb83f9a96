"""Errors that reach the user's script. Names and bases are those of the reference.

RestartError(Exception)
├── HealthCheckError    a health check failed: this worker leaves
├── TimeoutError        a wait of the library ran out
├── InternalError       a promise of our own code is broken: a bug
└── NoAgentError        no agent to speak to: the message says how to start the script
RestartAbort(BaseException)   no further restart; leaves every handler of the script
StaleStateError(BaseException)   this process cannot have its new rank: another one takes its place
"""

from unbroken_core.vocabulary.errors import UnbrokenError


class RestartError(UnbrokenError):
    """Root of the errors of `inprocess.Wrapper`."""


class RestartAbort(BaseException):
    """The job is over, or must not be restarted: ends the wrapped call on this worker."""


class StaleStateError(BaseException):
    """torch in this process may still hold something of a previous rank; the message says what. A new process follows.

    Leaves every handler of the script: whoever swallowed it would train, and write checkpoints, with wrong offsets.
    """


class HealthCheckError(RestartError):
    """A health check failed; the worker leaves the job."""


class InternalError(RestartError):
    """A bug of the wrapper."""


class TimeoutError(RestartError):  # noqa: A001 - the reference's name
    """A bounded wait of the wrapper ran out."""


class NoAgentError(RestartError):
    """The process was not started by Unbroken; the message says how to start it."""
