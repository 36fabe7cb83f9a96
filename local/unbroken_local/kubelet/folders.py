"""Where a node keeps the files of its pods.

    DIR/logs/<namespace>_<pod>_<uid>/<container>/<restarts>.log   kept when the pod is gone
    DIR/claims/<namespace>/<claim>                                what a PersistentVolumeClaim stands for, kept
    SHORT/v/<uid>/<volume>                                        the pod's volumes, deleted with it
    SHORT/v/<uid>/.ends/<container>                               termination messages

SHORT is a symbolic link to DIR with a short name: a Unix socket's path has at most 107 characters, and pods put sockets
into their volumes.
"""

import hashlib
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from unbroken_core.vocabulary.errors import InputError
from unbroken_local.kubelet.spec import PodSpec

UID_CHARACTERS = 13
"""Of the pod's uid, enough to tell pods apart."""


@dataclass(frozen=True)
class Folders:
    """Paths of one cluster's folder."""

    directory: Path
    short: Path

    @classmethod
    def create(cls, directory: Path) -> "Folders":
        """Make the folder and its short name. Raises InputError."""
        directory = directory.resolve()
        short = short_name(directory)
        try:
            for name in ("logs", "claims", "v"):
                (directory / name).mkdir(parents=True, exist_ok=True)
            if short.is_symlink():
                short.unlink()
            short.symlink_to(directory, target_is_directory=True)
        except OSError as error:
            raise InputError(f"{directory}: want a folder that can be written, got {error}") from error
        return cls(directory, short)

    def remove_short(self) -> None:
        """Remove the short name."""
        self.short.unlink(missing_ok=True)

    def volumes(self, pod: PodSpec) -> Path:
        """Return the folder of a pod's volumes."""
        return self.short / "v" / pod.uid[:UID_CHARACTERS]

    def termination_file(self, pod: PodSpec, container: str) -> Path:
        """Return the file that stands for a container's terminationMessagePath."""
        return self.volumes(pod) / ".ends" / container

    def account_file(self, pod: PodSpec, container: str) -> Path:
        """Return the kubeconfig of the service account that a container may use."""
        return self.volumes(pod) / ".ends" / f"{container}.kubeconfig"

    def log(self, pod: PodSpec, container: str, restarts: int) -> Path:
        """Return the log file of one run of a container."""
        return self.directory / "logs" / f"{pod.namespace}_{pod.name}_{pod.uid}" / container / f"{restarts}.log"

    def claim(self, namespace: str, name: str) -> Path:
        """Return the folder that stands for a PersistentVolumeClaim."""
        return self.directory / "claims" / namespace / name

    def remove_volumes(self, pod: PodSpec) -> None:
        """Delete the pod's volumes."""
        shutil.rmtree(self.volumes(pod), ignore_errors=True)


def short_name(directory: Path) -> Path:
    """Return the short name of a cluster's folder: the same for the same folder."""
    digest = hashlib.blake2s(str(directory.resolve()).encode(), digest_size=4).hexdigest()
    return Path(tempfile.gettempdir()) / f"ub-{digest}"
