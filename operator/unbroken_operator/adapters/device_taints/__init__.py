"""Reads taints of devices (dynamic resource allocation, resource.k8s.io/v1); see docs/design/0036."""
