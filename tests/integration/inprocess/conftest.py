"""Ends what the tests of this folder share."""

from collections.abc import Iterator

import pytest

from .forked import MUCH_OF_TORCH, ZYGOTE


@pytest.fixture(scope="session", autouse=True)
def _zygote() -> Iterator[None]:
    yield
    ZYGOTE.close()
    MUCH_OF_TORCH.close()
