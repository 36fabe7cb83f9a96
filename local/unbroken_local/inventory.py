"""The nodes file: which fake nodes there are, and which images this machine stands in for.

    - name: gpu-1
      labels: {unbroken.dev/rack: rack-1}
      allocatable: {nvidia.com/gpu: 8, cpu: 64, memory: 512Gi}
      taints: [{key: nvidia.com/gpu, value: present, effect: NoSchedule}]

The file is a list of nodes, or a mapping with `nodes` and `images`: a list of {pattern, env, path, workdir, folders,
entrypoint, command}, looked at before the built-in ones.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from unbroken_core.vocabulary.errors import InputError
from unbroken_local.kube.quantity import parse_quantity
from unbroken_local.kubelet.images import ImageRule
from unbroken_local.kubelet.node import NodeSpec

MAX_NODES = 200
DEFAULT_ALLOCATABLE = {"cpu": "64", "memory": "512Gi", "pods": "110"}
EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_DNS_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


@dataclass(frozen=True)
class Inventory:
    """What the nodes file says."""

    nodes: tuple[NodeSpec, ...]
    images: tuple[ImageRule, ...] = ()


def read_inventory(path: Path) -> Inventory:
    """Read a nodes file. Raises InputError that says what, where, seen and wanted."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: want a readable file, got {error.strerror or error}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{path}: want YAML, got {' '.join(str(error).split())}") from error
    try:
        return parse_inventory(data)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def parse_inventory(data: Any) -> Inventory:
    """Check the content of a nodes file. Raises InputError."""
    if isinstance(data, dict):
        _known(data, {"nodes", "images"}, "file")
        images = tuple(_image(raw, f"images[{i}]") for i, raw in enumerate(_list(data.get("images") or [], "images")))
        data = data.get("nodes")
    else:
        images = ()
    entries = _list(data, "nodes")
    if not 1 <= len(entries) <= MAX_NODES:
        raise InputError(f"nodes: want 1 to {MAX_NODES} nodes, got {len(entries)}")
    nodes = tuple(_node(raw, f"nodes[{index}]") for index, raw in enumerate(entries))
    names = [node.name for node in nodes]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise InputError(f"nodes[{index}].name: want a name of its own, got {name!r} again")
    return Inventory(nodes, images)


def _node(raw: Any, where: str) -> NodeSpec:
    data = _mapping(raw, where)
    _known(data, {"name", "labels", "allocatable", "taints"}, where)
    name = data.get("name")
    if not isinstance(name, str) or not _DNS_NAME.fullmatch(name):
        raise InputError(f"{where}.name: want a DNS name (lower case letters, digits, '-', '.'), got {name!r}")
    return NodeSpec(
        name=name,
        labels=_labels(data.get("labels"), f"{where}.labels"),
        allocatable={**DEFAULT_ALLOCATABLE, **_quantities(data.get("allocatable"), f"{where}.allocatable")},
        taints=tuple(
            _taint(t, f"{where}.taints[{i}]") for i, t in enumerate(_list(data.get("taints") or [], f"{where}.taints"))
        ),
    )


def _labels(raw: Any, where: str) -> dict[str, str]:
    result: dict[str, str] = {}
    for key, value in _mapping(raw or {}, where).items():
        text = str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else None
        if not isinstance(key, str) or not _LABEL_KEY.fullmatch(key):
            raise InputError(f"{where}: want label names such as unbroken.dev/rack, got {key!r}")
        if text is None or not _LABEL_VALUE.fullmatch(text):
            raise InputError(
                f"{where}.{key}: want a label value (at most 63 letters, digits, '-', '_', '.'), got {value!r}"
            )
        result[key] = text
    return result


def _quantities(raw: Any, where: str) -> dict[str, str]:
    result: dict[str, str] = {}
    for key, value in _mapping(raw or {}, where).items():
        try:
            is_sound = parse_quantity(value) >= 0
        except InputError:
            is_sound = False
        if not is_sound:
            raise InputError(f'{where}.{key}: want a quantity of at least 0 such as 8, "500m" or "2Gi", got {value!r}')
        result[str(key)] = str(value)
    return result


def _taint(raw: Any, where: str) -> dict[str, str]:
    data = _mapping(raw, where)
    _known(data, {"key", "value", "effect"}, where)
    if not isinstance(data.get("key"), str) or not _LABEL_KEY.fullmatch(data["key"]):
        raise InputError(f"{where}.key: want a name such as nvidia.com/gpu, got {data.get('key')!r}")
    if data.get("effect") not in EFFECTS:
        raise InputError(f"{where}.effect: want one of {', '.join(EFFECTS)}, got {data.get('effect')!r}")
    return {key: str(value) for key, value in data.items()}


def _image(raw: Any, where: str) -> ImageRule:
    data = _mapping(raw, where)
    _known(data, {"pattern", "env", "path", "workdir", "folders", "entrypoint", "command"}, where)
    if not isinstance(data.get("pattern"), str) or not data["pattern"]:
        raise InputError(f"{where}.pattern: want a pattern such as team/trainer:*, got {data.get('pattern')!r}")
    texts = {
        key: tuple(str(word) for word in _list(data.get(key) or [], f"{where}.{key}"))
        for key in ("path", "entrypoint", "command")
    }
    maps = {
        key: {str(k): str(v) for k, v in _mapping(data.get(key) or {}, f"{where}.{key}").items()}
        for key in ("env", "folders")
    }
    return ImageRule(
        data["pattern"],
        env=maps["env"],
        path=texts["path"],
        workdir=str(data.get("workdir") or "/"),
        folders=maps["folders"],
        entrypoint=texts["entrypoint"],
        command=texts["command"],
    )


def _known(data: Mapping[Any, Any], wanted: set[str], where: str) -> None:
    for key in data:
        if key not in wanted:
            raise InputError(f"{where}.{key}: unknown field; want only {', '.join(sorted(wanted))}")


def _mapping(raw: Any, where: str) -> dict[Any, Any]:
    if not isinstance(raw, dict):
        raise InputError(f"{where}: want a mapping, got {_kind(raw)}")
    return raw


def _list(raw: Any, where: str) -> list[Any]:
    if not isinstance(raw, list):
        raise InputError(f"{where}: want a list, got {_kind(raw)}")
    return raw


def _kind(raw: Any) -> str:
    return "nothing" if raw is None else f"{type(raw).__name__} {raw!r}"[:80]
