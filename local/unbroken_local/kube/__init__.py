"""A small asyncio client of any Kubernetes API server: kubeconfig, requests with bounded retries, list and watch."""

from typing import Any

Json = dict[str, Any]
"""A Kubernetes object, or a part of one."""
