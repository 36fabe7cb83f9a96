"""What the parts of one pod share: messages, the page of stamps, stacks, liveness."""
