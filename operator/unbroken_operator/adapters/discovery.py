"""What the API server serves: whether it knows of jobs yet, and whether it has native sidecars."""

import asyncio
import logging

from unbroken_operator.adapters.errors import KubeError, KubeNotFound, KubeNotServed
from unbroken_operator.adapters.kube import Kube, collection_path
from unbroken_operator.api import layout

logger = logging.getLogger(__name__)

RETRY_S = 1.0
NATIVE_SIDECARS_SINCE = (1, 29)


async def is_served(kube: Kube, namespaces: tuple[str, ...]) -> bool:
    """Return whether the API server serves jobs, and says so."""
    try:
        await _look_for_jobs(kube, namespaces)
    except KubeError:
        return False
    return True


async def _look_for_jobs(kube: Kube, namespaces: tuple[str, ...]) -> None:
    """Raise KubeError unless the API server serves jobs, and says so.

    A server that has just started may serve them before discovery lists them. kopf reads that list once.
    """
    await kube.peek(collection_path(layout.PLURAL, namespaces[0] if namespaces else None, layout.API_VERSION))
    groups = (await kube.get("/apis")).get("groups") or ()
    kinds = (await kube.get(f"/apis/{layout.API_VERSION}")).get("resources") or ()
    if layout.GROUP not in {group["name"] for group in groups} or layout.PLURAL not in {kind["name"] for kind in kinds}:
        raise KubeNotServed(f"GET /apis: the API server serves {layout.PLURAL}, and does not say so yet")


async def wait_for_api(kube: Kube, namespaces: tuple[str, ...]) -> bool:
    """Wait for the API server and the CRD; return whether the cluster has native sidecars."""
    trouble = ""
    while True:
        try:
            is_native = await has_native_sidecars(kube)
            await _look_for_jobs(kube, namespaces)
        except (KubeNotFound, KubeNotServed):
            found = f"no CRD {layout.CRD_NAME}, install crds/resilienttrainingjobs.yaml"
        except KubeError as error:
            found = str(error)
        else:
            return is_native
        if found != trouble:
            logger.warning("waiting for the API server error=%s", found)
        trouble = found
        await asyncio.sleep(RETRY_S)


async def has_native_sidecars(kube: Kube) -> bool:
    """Return whether the API server keeps the restartPolicy of init containers. Raises KubeError."""
    version = await kube.get("/version")
    numbers = tuple(int("".join(filter(str.isdigit, str(version.get(key, "0")))) or 0) for key in ("major", "minor"))
    return numbers >= NATIVE_SIDECARS_SINCE
