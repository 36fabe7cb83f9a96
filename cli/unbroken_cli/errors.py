"""The command's errors beside unbroken_core's InputError (exit code 2)."""

from unbroken_core.vocabulary.errors import UnbrokenError


class CommandError(UnbrokenError):
    """What was asked could not be read: show the message, exit code 1."""


class NotThere(CommandError):
    """The API server knows no such thing."""


def refusal_hint(said: str, resource: str, otherwise: str) -> str:
    """Return what may help where kubectl could not reach into a pod by `resource`, as in pods/exec."""
    if "forbidden" in said.lower():
        return f"you need the right to create {resource}"
    if "could not find the requested resource" in said:
        return f"this API server does not serve {resource}, as that of `unbroken local` does not: {otherwise}"
    return f"you may lack the right to create {resource}, or the pod lacks Python"
