"""The sidecar's process: it speaks for the pod. No torch: it must start at once and stay small.

Here: the process itself, its settings and its entry point. What the pod should do next is decided in `decisions`;
sockets, files and metrics are in `adapters`. Nothing here starts or ends processes: the launcher does.
"""
