"""The scheduler: `decide` is a pure function from a snapshot to bindings and refusals, `shell` writes them down.

It knows nodes and pods, and starts nothing: the kubelet does.
"""
