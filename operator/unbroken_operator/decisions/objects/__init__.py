"""The Kubernetes objects that a job needs, as plain dictionaries."""
