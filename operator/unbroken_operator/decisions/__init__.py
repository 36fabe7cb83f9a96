"""Pure functions from what is seen to what is to be done: `plan` from one snapshot, `review`, `quarantine`.

Time comes in as an argument. No kopf, no Kubernetes client, no clock, no randomness, no logging, no input or output.
"""
