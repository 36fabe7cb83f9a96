"""Who gets which rank: the tree of domains, and the worlds that are planned on it."""
