"""Manifests of the objects that a job needs, and what is read back from them. No decision whether they are needed."""
