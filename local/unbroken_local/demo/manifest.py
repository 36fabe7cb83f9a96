"""The example's manifest as the demonstration applies it: all the same but for the folder of the checkpoints. Pure."""

import re
from typing import Any

from unbroken_core.errors import InputError
from unbroken_local.kube import Json


def with_folder(job: Json, folder: str) -> Json:
    """Return the job with the path of its only hostPath volume replaced. Raises InputError when there is none."""
    volumes = job["spec"]["template"]["spec"].get("volumes") or []
    found = [volume for volume in volumes if "hostPath" in volume]
    if len(found) != 1:
        raise InputError(f"spec.template.spec.volumes: want one hostPath volume, got {len(found)}")
    changed = [
        {**item, "hostPath": {**item["hostPath"], "path": folder}} if item in found else item for item in volumes
    ]
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
