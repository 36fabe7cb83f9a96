"""Where a job is read: the API server or its rendezvous; either way it becomes a `Job`. No text for people."""
