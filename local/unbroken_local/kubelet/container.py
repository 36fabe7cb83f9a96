"""From a container's spec to the process to start: environment, command line, folders."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from unbroken_core.vocabulary.errors import UnbrokenError
from unbroken_local.kube import Json
from unbroken_local.kubelet.environment import Sources, build_environment, expand
from unbroken_local.kubelet.images import ImageRule, base_environment
from unbroken_local.kubelet.paths import Rewrite, path_rewriter
from unbroken_local.kubelet.spec import ContainerSpec
from unbroken_local.kubelet.volumes import mounted_folders
from unbroken_local.processes.host import ProcessSpec

ACCOUNT_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"


class CreateError(UnbrokenError):
    """The container has nothing that could be run (CreateContainerError)."""


@dataclass(frozen=True)
class Launch:
    """How to start a container, and how to start something else in it (exec probes and hooks)."""

    main: ProcessSpec
    rewrite: Rewrite

    def command(self, argv: list[str], log: Path) -> ProcessSpec:
        """Return another command in the container."""
        return replace(self.main, argv=tuple(self.rewrite(word) for word in argv), log=str(log))


@dataclass(frozen=True)
class LaunchContext:
    """What a container is started with."""

    image: ImageRule
    sources: Sources
    volumes: Mapping[str, Path]
    termination_file: Path
    log: Path
    rewrite_names: Rewrite


def plan_launch(container: ContainerSpec, context: LaunchContext) -> Launch:
    """Return the process that a container is. Raises ConfigError, CreateError, MountError."""
    base = base_environment(context.image, host_name(context.sources.pod))
    variables = build_environment(container.raw, context.sources)
    known = {**base, **variables}
    folders = {
        **context.image.folders,
        container.termination_path: str(context.termination_file),
        **mounted_folders(container, context.volumes, lambda text: expand(text, known)),
    }
    rewrite_paths = path_rewriter(folders)

    def rewrite(text: str) -> str:
        return context.rewrite_names(rewrite_paths(text))

    environment = base | {name: rewrite(value) for name, value in variables.items()}
    argv = command_line(container, context.image, known)
    workdir = container.raw.get("workingDir") or context.image.workdir
    return Launch(
        ProcessSpec(tuple(rewrite(word) for word in argv), environment, rewrite(workdir), str(context.log)), rewrite
    )


def command_line(container: ContainerSpec, image: ImageRule, variables: Mapping[str, str]) -> list[str]:
    """Return command and arguments, with the image's where the container gives none. Raises CreateError."""
    command, args = container.raw.get("command") or [], container.raw.get("args") or []
    if command:
        words = [*command, *args]
        return [expand(str(word), variables) for word in words]
    words = [*image.entrypoint, *(args or image.command)]
    if not words:
        raise CreateError("no command specified: the container has no command and its image has no entrypoint here")
    return [expand(str(word), variables) for word in words]


def host_name(pod: Json) -> str:
    """Return the host name that the pod's containers see in HOSTNAME."""
    return str(pod["spec"].get("hostname") or pod["metadata"]["name"])


def references(container: ContainerSpec) -> set[tuple[str, str]]:
    """Return (plural kind, name) of each Secret and ConfigMap that the container's variables name."""
    found: set[tuple[str, str]] = set()
    for source in container.raw.get("envFrom") or []:
        for key, plural in (("secretRef", "secrets"), ("configMapRef", "configmaps")):
            if key in source:
                found.add((plural, source[key]["name"]))
    for variable in container.raw.get("env") or []:
        for key, plural in (("secretKeyRef", "secrets"), ("configMapKeyRef", "configmaps")):
            if key in (variable.get("valueFrom") or {}):
                found.add((plural, variable["valueFrom"][key]["name"]))
    return found
