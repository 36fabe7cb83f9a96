"""Sockets and stores of an iteration."""
