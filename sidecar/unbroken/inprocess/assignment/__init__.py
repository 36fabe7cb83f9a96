"""The script's rank assignment: how it is asked, answered and exchanged."""
