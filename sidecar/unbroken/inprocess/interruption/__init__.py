"""How a running function is ended."""
