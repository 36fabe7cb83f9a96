"""Names of the container images: what `make images` builds is what operator, chart and local cluster ask for."""

from unbroken_core import __version__

REPOSITORY = "unbroken"
PARTS = ("operator", "sidecar", "trainer-example")
"""Each has its folder below images/."""


def image_of(part: str, tag: str = __version__) -> str:
    """Return the image of one of PARTS, without a registry."""
    return f"{REPOSITORY}/{part}:{tag}"
