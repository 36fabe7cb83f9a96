"""Facts that several parts must agree on, without decisions: TLS, images, headers, console."""
