"""The checks that are built in: what each reads, and what it makes of that."""
