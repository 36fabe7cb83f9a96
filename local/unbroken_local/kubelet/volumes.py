"""A pod's volumes as folders on this machine."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from unbroken_local.kube import Json
from unbroken_local.kubelet.environment import Sources, data_of, field_value, resource_value
from unbroken_local.kubelet.folders import Folders
from unbroken_local.kubelet.payload import File, MountError, inside, is_payload, keep_part, write_files
from unbroken_local.kubelet.spec import ContainerSpec, PodSpec

Fetch = Callable[[str, str], Awaitable[Json | None]]
"""Plural kind ("secrets") and name to the object in the pod's namespace; None when there is none."""
FetchToken = Callable[[str, Json], Awaitable[str]]
"""Service account name and the serviceAccountToken source to a token."""


@dataclass(frozen=True)
class VolumeContext:
    """What volumes are made from."""

    pod: PodSpec
    folders: Folders
    sources: Sources
    fetch: Fetch
    fetch_token: FetchToken


async def make_volumes(context: VolumeContext) -> dict[str, Path]:
    """Make all volumes of a pod; return the folder of each by name. Raises MountError."""
    base = context.folders.volumes(context.pod)
    (base / ".ends").mkdir(parents=True, exist_ok=True)
    volumes = context.sources.pod["spec"].get("volumes") or []
    return {volume["name"]: await _make_volume(volume, base / volume["name"], context) for volume in volumes}


async def _make_volume(volume: Json, folder: Path, context: VolumeContext) -> Path:
    if "hostPath" in volume:
        return _host_path(volume)
    if "persistentVolumeClaim" in volume:
        folder = context.folders.claim(context.pod.namespace, volume["persistentVolumeClaim"]["claimName"])
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    kinds = sorted(set(volume) - {"name"})
    if kinds and kinds[0] not in {"emptyDir", "secret", "configMap", "downwardAPI", "projected", "ephemeral"}:
        raise MountError(f'volume "{volume["name"]}": a local cluster has no {kinds[0]} volumes')
    folder.mkdir(parents=True, exist_ok=True)
    if kinds and kinds[0] not in {"emptyDir", "ephemeral"}:
        write_files(folder, await volume_files(volume, context))
    return folder


def _host_path(volume: Json) -> Path:
    source = volume["hostPath"]
    path = Path(source["path"])
    kind = source.get("type") or ""
    if kind == "DirectoryOrCreate":
        path.mkdir(parents=True, exist_ok=True)
    elif kind == "FileOrCreate":
        path.touch()
    elif (kind == "Directory" and not path.is_dir()) or (kind == "File" and not path.is_file()):
        raise MountError(f'volume "{volume["name"]}": hostPath type check failed: {path} is not a {kind.lower()}')
    elif not kind and not path.exists():
        path.mkdir(parents=True)
    return path


async def volume_files(volume: Json, context: VolumeContext) -> list[File]:
    """Return the files of a secret, configMap, downwardAPI or projected volume. Raises MountError."""
    if "projected" in volume:
        mode = volume["projected"].get("defaultMode") or 0o644
        return [
            file
            for source in volume["projected"].get("sources") or []
            for file in await _files(source, mode, volume, context)
        ]
    for kind in ("secret", "configMap", "downwardAPI"):
        if kind in volume:
            source = volume[kind]
            named = {**source, "name": source.get("secretName") or source.get("name")}
            return await _files({kind: named}, source.get("defaultMode") or 0o644, volume, context)
    return []


async def _files(source: Json, mode: int, volume: Json, context: VolumeContext) -> list[File]:
    if "downwardAPI" in source:
        return [_downward_file(item, mode, context) for item in source["downwardAPI"].get("items") or []]
    if "serviceAccountToken" in source:
        account = context.sources.pod["spec"].get("serviceAccountName") or "default"
        token = await context.fetch_token(account, source["serviceAccountToken"])
        return [File(source["serviceAccountToken"]["path"], token.encode(), 0o600)]
    for kind, plural in (("secret", "secrets"), ("configMap", "configmaps")):
        if kind in source:
            return await _object_files(source[kind], plural, mode, volume, context)
    return []


async def _object_files(reference: Json, plural: str, mode: int, volume: Json, context: VolumeContext) -> list[File]:
    name = reference["name"]
    owner = await context.fetch(plural, name)
    if owner is None:
        if reference.get("optional"):
            return []
        raise MountError(f'MountVolume.SetUp failed for volume "{volume["name"]}" : {plural[:-1]} "{name}" not found')
    data = data_of(owner)
    if not reference.get("items"):
        return [File(key, value, mode) for key, value in data.items()]
    files = []
    for item in reference["items"]:
        if item["key"] in data:
            files.append(File(item["path"], data[item["key"]], item.get("mode") or mode))
        elif not reference.get("optional"):
            what = f"references non-existent {plural[:-1]} key: {item['key']}"
            raise MountError(f'MountVolume.SetUp failed for volume "{volume["name"]}" : {what}')
    return files


def _downward_file(item: Json, mode: int, context: VolumeContext) -> File:
    if "fieldRef" in item:
        text = field_value(item["fieldRef"]["fieldPath"], context.sources)
    else:
        text = resource_value(item["resourceFieldRef"], {}, context.sources.pod)
    return File(item["path"], text.encode(), item.get("mode") or mode)


def mounted_folders(
    container: ContainerSpec, volumes: Mapping[str, Path], expand: Callable[[str], str]
) -> dict[str, str]:
    """Return mount path -> folder (or file) of each of the container's mounts. Raises MountError."""
    result: dict[str, str] = {}
    for mount in container.raw.get("volumeMounts") or []:
        if mount["name"] not in volumes:
            raise MountError(f'volumeMounts: want a volume of the pod, got "{mount["name"]}"')
        target = volumes[mount["name"]]
        sub_path = mount.get("subPath") or expand(mount.get("subPathExpr") or "")
        if sub_path:
            part = inside(sub_path)
            if is_payload(target) and (target / part).exists():
                # As the kubelet's own: a part of a volume is what it was when the container started.
                target = keep_part(target, part)
            else:
                target = target / part
                if not target.exists():
                    target.mkdir(parents=True)
        result[mount["mountPath"]] = str(target)
    return result
