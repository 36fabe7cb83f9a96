"""Somebody deletes each pod as soon as it is there: the operator on a real API server creates them ever less often."""

import asyncio
import contextlib
import time
from pathlib import Path

from tests.waiting import eventually

from unbroken_operator.adapters.errors import KubeConflict, KubeNotFound
from unbroken_operator.api import layout

from .operator_bench import bench, operator

WATCHED_S = 12.0


def test_a_job_whose_pods_are_deleted_at_once_backs_off_and_others_do_not_notice(
    kubeconfig: Path, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with bench(kubeconfig, tmp_path) as made:
            await made.apply("circle", replicas=1)
            seen: set[str] = set()
            with operator(made):
                end_s = time.monotonic() + WATCHED_S

                async def is_told() -> bool:
                    """Delete what is there; return whether it was said, and has been done for a while."""
                    for pod in (await made.kube.list(made.path("pods")))[0]:
                        metadata = pod["metadata"]
                        if metadata["labels"].get(layout.JOB_LABEL) == "circle":
                            seen.add(metadata["uid"])
                            with contextlib.suppress(KubeNotFound, KubeConflict):
                                await made.kube.delete(made.path("pods", metadata["name"]), metadata["uid"], True)
                    told = (await made.condition("circle", "PodsReady")).get("reason") == "PodCreationBackOff"
                    return told and time.monotonic() >= end_s

                # On a slow machine the first rounds, which cost nothing, take longer than that.
                await eventually(is_told, "the circle is told")
                await made.apply("sound", replicas=1)

                async def is_sound() -> bool:
                    # The last pod of the other job may have been made after the last look.
                    return "sound-0" in await made.pod_names()

                await eventually(is_sound, "a pod of the other job", describe=made.operator_log)
            assert len(seen) <= 2 * 10

    asyncio.run(scenario())
