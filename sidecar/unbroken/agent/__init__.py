"""The sidecar's process: the pod's voice. Decisions are in `member` (pure); the rest is sockets. No torch."""
