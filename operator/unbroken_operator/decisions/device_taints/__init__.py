"""What taints of devices (dynamic resource allocation, resource.k8s.io/v1) mean for pods; see docs/design/0036."""
