"""A small asyncio client of any Kubernetes API server: kubeconfig, requests with bounded retries, list and watch.

And what all of its users read in objects alike: quantities, resources, taints. It knows nothing of this local cluster.
"""

from typing import Any

Json = dict[str, Any]
"""A Kubernetes object, or a part of one."""
