"""A Kubernetes small enough for a laptop: API server, scheduler and kubelet in Python, pods as processes."""
