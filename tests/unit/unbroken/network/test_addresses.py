"""What is read of addresses."""

import pytest

from unbroken.network.addresses import address_to_listen_on, plain_address, split_address
from unbroken_core.vocabulary.errors import InputError


def test_address_and_port_are_told_apart() -> None:
    found = [split_address("X", text) for text in ("host:1", "[::1]:65535", "0.0.0.0:0")]
    assert found == [("host", 1), ("::1", 65535), ("0.0.0.0", 0)]
    for text in ("host", "host:", "host:x", "host:65536", "host:²"):
        with pytest.raises(InputError, match="X: want address:port, got"):
            split_address("X", text)


def test_address_is_told_without_zone_and_without_the_mark_of_ipv4() -> None:
    found = [plain_address(text) for text in ("10.1.2.3", "::ffff:10.1.2.3", "fe80::1%eth0")]
    assert found == ["10.1.2.3", "10.1.2.3", "fe80::1"]


def test_loopback_is_listened_on_alone_and_for_any_other_address_all_are() -> None:
    assert [address_to_listen_on("X", text) for text in ("127.0.0.2", "10.1.2.3")] == ["127.0.0.2", "0.0.0.0"]
