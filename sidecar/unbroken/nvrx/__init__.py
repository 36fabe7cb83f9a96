"""Scripts of NVIDIA's resiliency extension, as they are: their import of its `inprocess` finds ours.

    from unbroken.nvrx import install
    install()

before the script's own imports, or `python -m unbroken.nvrx script.py`. Importing this imports no torch.
"""

from unbroken.nvrx.finder import AlreadyLoadedError, install

__all__ = ["AlreadyLoadedError", "install"]
