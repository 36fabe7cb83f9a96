"""The service of a job: the shell around the coordinator, with its WebSocket and HTTP API. No torch."""
