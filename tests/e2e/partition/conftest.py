"""The network and the job of tests/integration/partition."""

from tests.integration.partition.partition_fixtures import network, start_job

__all__ = ["network", "start_job"]
