"""Pure decisions from one snapshot. No kopf, no Kubernetes client, no clock, no input or output."""
