"""Tests of partitions that `make test` has time for; the others are in tests/e2e/partition."""

from .partition_fixtures import network, start_job

__all__ = ["network", "start_job"]
