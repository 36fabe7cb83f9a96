"""Input and output: the API server, the rendezvous, metrics, logs. No decisions about a job."""
