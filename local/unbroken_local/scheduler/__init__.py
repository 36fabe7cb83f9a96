"""The scheduler: `decide` is a pure function from a snapshot to bindings and refusals, `shell` writes them down."""
