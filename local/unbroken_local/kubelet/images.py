"""Which local programs stand for which container image. An image that no rule names cannot be pulled."""

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from unbroken_core.conventions.images import image_of


@dataclass(frozen=True)
class ImageRule:
    """What an image is on this machine; `pattern` is a shell pattern of `repository:tag` (or `repository@digest`)."""

    pattern: str
    env: Mapping[str, str] = field(default_factory=dict)
    path: tuple[str, ...] = ()
    """Folders that come first in PATH."""
    workdir: str = "/"
    folders: Mapping[str, str] = field(default_factory=dict)
    """Folders of the image (such as /app) and where they are on this machine."""
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    """Arguments of the entrypoint when the container gives neither command nor args."""


def default_rules(examples: Path | None = None) -> tuple[ImageRule, ...]:
    """Return the project's own images: this Python environment, with `examples` (or the checkout's) as /app."""
    folder = examples or Path(__file__).parents[3] / "examples"
    folders = {"/app": str(folder)} if folder.is_dir() else {}
    environment = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    path = (str(Path(sys.executable).parent),)
    workdir = "/app" if folders else "/"
    names = (image_of("sidecar", "*"), image_of("trainer-example", "*"))
    plain = tuple(ImageRule(name, environment, path, workdir, folders) for name in names)
    entrypoint = ("python3", "-m", "unbroken_operator")
    operator = ImageRule(
        image_of("operator", "*"),
        environment,
        path,
        workdir,
        folders,
        entrypoint=entrypoint,
    )
    return (*plain, operator)


def find_image(image: str, rules: Iterable[ImageRule]) -> ImageRule | None:
    """Return the first rule whose pattern fits the image, with or without docker.io/ in front and :latest behind."""
    name = image.removeprefix("docker.io/").removeprefix("library/")
    if "@" not in name and ":" not in name.rpartition("/")[2]:
        name = f"{name}:latest"
    elif "@" in name:
        name = name.replace("@", ":", 1)
    for rule in rules:
        if fnmatchcase(name, rule.pattern) or fnmatchcase(image, rule.pattern):
            return rule
    return None


def base_environment(rule: ImageRule, host_name: str) -> dict[str, str]:
    """Return the variables that the image and the container runtime set before the container's own."""
    inherited = {
        name: os.environ[name] for name in ("HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "USER") if name in os.environ
    }
    path = os.pathsep.join([*rule.path, os.environ.get("PATH", os.defpath)])
    return {**inherited, "PATH": path, "HOSTNAME": host_name, **rule.env}
