"""The store classes that `store_factory` may name in a script of the reference: torch's own.

No store is made of them: the agent pushes, nothing is polled. They are looked up when they are used, so that this
package's import stays cheap.
"""

from typing import Any

_NAMES = ("FileStore", "PrefixStore", "TCPStore")


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: want one of {', '.join(_NAMES)}")
    import torch.distributed as dist  # noqa: PLC0415 - the package's import must stay cheap

    return getattr(dist, name)


def __dir__() -> list[str]:
    return list(_NAMES)
