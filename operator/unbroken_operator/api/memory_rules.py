"""Pure: what must hold of a job with checkpoints in memory: one table for the CRD's rules, webhook and operator.

    size     within bounds, in one notation
    volume   the operator's own, whose name and place in the trainer nothing of the template has
    disk     a folder on a volume that the trainer mounts and may write, and that does not end with the pod

A job without `spec.memory` may call its volumes what it likes: it did before there was such a field.
"""

import posixpath
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from unbroken_operator.api import layout
from unbroken_operator.api.quantities import SIZE_PATTERN, SIZE_WANTED, is_size

Part = Mapping[str, Any]
MAX_SHOWN = 80
_NAME, _PATH = layout.STATE_VOLUME, layout.STATE_PATH
_OURS = f"{_NAME} is the operator's in a job with spec.memory: rename yours"
_PLACE = f"{_PATH} is where the operator mounts the checkpoints of a job with spec.memory: mount yours elsewhere"
_DISK = "memory.disk.directory: want a folder on a volume that the template's first container mounts"
SIZE_CEL = f"string(self.sizeLimit).matches('{SIZE_PATTERN}')"
SIZE_MESSAGE = f"memory.sizeLimit: {SIZE_WANTED}"


@dataclass(frozen=True)
class MemoryRule:
    """One row."""

    find: Callable[[Part], Iterator[str]]
    """Yields `where: what is wrong with it`, below the spec of a job with memory."""
    cel: str
    """True of the spec of a job with memory that is sound."""
    message: str
    field_path: str


def _volumes(spec: Part) -> Iterator[str]:
    for index, volume in enumerate(_pod(spec).get("volumes") or ()):
        if volume.get("name") == _NAME:
            yield f"template.spec.volumes[{index}].name: {_OURS}"


def _mounts(spec: Part) -> Iterator[str]:
    for kind in ("containers", "initContainers"):
        for index, container in enumerate(_pod(spec).get(kind) or ()):
            for place, mount in enumerate(container.get("volumeMounts") or ()):
                if mount.get("name") == _NAME:
                    yield f"template.spec.{kind}[{index}].volumeMounts[{place}].name: {_OURS}"


def _places(spec: Part) -> Iterator[str]:
    trainer: Part = (_pod(spec).get("containers") or ({},))[0]
    for place, mount in enumerate(trainer.get("volumeMounts") or ()):
        path = mount.get("mountPath")
        if isinstance(path, str) and _is_below(path, _PATH):
            yield f"template.spec.containers[0].volumeMounts[{place}].mountPath: {_PLACE}, got {_shown(path)}"


def _disk(spec: Part) -> Iterator[str]:
    disk = (spec.get("memory") or {}).get("disk")
    if disk is None:
        return
    directory: str = disk["directory"]
    trainer: Part = (_pod(spec).get("containers") or ({},))[0]
    covering = [
        (path, mount)
        for mount in trainer.get("volumeMounts") or ()
        if isinstance(mount.get("mountPath"), str) and _is_below(directory, path := _normal(mount["mountPath"]))
    ]
    if not covering or _is_below(directory, _PATH):
        yield f"{_DISK}, got {_shown(directory)}"
        return
    # Of two mounts the inner one counts.
    _, mount = max(covering, key=lambda one: len(one[0]))
    if mount.get("readOnly"):
        yield f"{_DISK}, got {_shown(directory)}, where {mount.get('name')} is mounted readOnly"
    volumes = (one for one in _pod(spec).get("volumes") or () if one.get("name") == mount.get("name"))
    if any("emptyDir" in one for one in volumes):
        yield f"{_DISK} and that outlives the pod, got {_shown(directory)}, where {mount.get('name')} is an emptyDir"


def _normal(path: str) -> str:
    return posixpath.normpath("/" + path.lstrip("/"))


def _is_below(path: str, folder: str) -> bool:
    return f"{_normal(path)}/".startswith(f"{folder.rstrip('/')}/")


def _shown(path: str) -> str:
    return repr(path if len(path) <= MAX_SHOWN else f"{path[: MAX_SHOWN - 3]}...")


def _pod(spec: Part) -> Part:
    found: Part = (spec.get("template") or {}).get("spec") or {}
    return found


def _sound_mounts(kind: str) -> str:
    containers = f"self.template.spec.{kind}"
    each = f"{containers}.all(c, !has(c.volumeMounts) || c.volumeMounts.all(m, m.name != '{_NAME}'))"
    return each if kind == "containers" else f"(!has({containers}) || {each})"


_MOUNTS = "self.template.spec.containers[0].volumeMounts"
MEMORY_RULES = (
    MemoryRule(
        _volumes,
        f"!has(self.template.spec.volumes) || self.template.spec.volumes.all(v, v.name != '{_NAME}')",
        f"template.spec.volumes: {_OURS}",
        ".template",
    ),
    MemoryRule(
        _mounts,
        f"{_sound_mounts('containers')} && {_sound_mounts('initContainers')}",
        f"template.spec: a mount of {_OURS}",
        ".template",
    ),
    MemoryRule(
        _places,
        f"!has({_MOUNTS}) || {_MOUNTS}.all(m, !has(m.mountPath) || "
        f"(m.mountPath != '{_PATH}' && !m.mountPath.startsWith('{_PATH}/')))",
        f"template.spec.containers[0].volumeMounts: {_PLACE}",
        ".template",
    ),
    # Webhook and operator look at the volume, too.
    MemoryRule(
        _disk,
        f"!has(self.memory.disk) || (has({_MOUNTS}) && {_MOUNTS}.exists(m, has(m.mountPath) && "
        "(self.memory.disk.directory == m.mountPath || self.memory.disk.directory.startsWith("
        "m.mountPath.endsWith('/') ? m.mountPath : m.mountPath + '/'))))",
        _DISK,
        ".memory.disk.directory",
    ),
)


def cel_of(row: MemoryRule) -> str:
    """Return the rule for the spec of any job."""
    return f"!has(self.memory) || ({row.cel})"


def refusals(spec: Part) -> Iterator[str]:
    """Yield what is refused of a spec, as the API has it, each with its place below it."""
    memory = spec.get("memory")
    if memory is None:
        return
    if not is_size(memory.get("sizeLimit")):
        yield f"memory.sizeLimit: {SIZE_WANTED}, got {str(memory.get('sizeLimit'))[:MAX_SHOWN]!r}"
    for row in MEMORY_RULES:
        yield from row.find(spec)
