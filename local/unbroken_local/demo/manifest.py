"""The example's manifest as the demonstration applies it: all the same but for the folder of the checkpoints. Pure."""

import re
from typing import Any

from unbroken_core.vocabulary.errors import InputError
from unbroken_local.kube import Json


def with_folder(job: Json, folder: str) -> Json:
    """Return the job with a folder of this machine in the place of its only claim. Raises InputError without one."""
    volumes = job["spec"]["template"]["spec"].get("volumes") or []
    found = [volume for volume in volumes if "persistentVolumeClaim" in volume]
    if len(found) != 1:
        raise InputError(f"spec.template.spec.volumes: want one with a persistentVolumeClaim, got {len(found)}")
    here = {"hostPath": {"path": folder, "type": "DirectoryOrCreate"}}
    changed = [{"name": item["name"], **here} if item in found else item for item in volumes]
    template: Any = job["spec"]["template"]
    return {**job, "spec": {**job["spec"], "template": {**template, "spec": {**template["spec"], "volumes": changed}}}}


def number_of_steps(job: Json) -> int:
    """Return the value of `--steps` in the trainer's command. Raises InputError when it is not there."""
    container = job["spec"]["template"]["spec"]["containers"][0]
    words = [*(container.get("command") or []), *(container.get("args") or [])]
    for word in words:
        if match := re.fullmatch(r"--steps=(\d+)", word):
            return int(match[1])
    raise InputError(f"spec.template.spec.containers[0].command: want --steps=NUMBER among the words, got {words}")
