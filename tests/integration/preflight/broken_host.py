"""A host of a preflight that is broken in one way: `broken_host.py FAULT [options of unbroken preflight]`."""

import signal
import sys
from typing import Any

import torch

from unbroken.preflight import exchange, main, pair_trial

_matmul, _pattern = torch.matmul, exchange._pattern


def _wrong_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    product = _matmul(left, right)
    product[7, 3] += 1
    return product


def _wrong_data(rank: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    data = _pattern(rank, num_bytes, device)
    data[5] += 1
    return data


def _hang(*_arguments: Any) -> Any:
    while True:
        signal.pause()


def _die(*_arguments: Any) -> Any:
    signal.raise_signal(signal.SIGKILL)


def break_host(fault: str) -> None:
    """Break what the children of this process do."""
    match fault:
        case "product":
            vars(torch)["matmul"] = _wrong_product
        case "hanging-product":
            vars(torch)["matmul"] = _hang
        case "data":
            # The loopback collective tests with itself, and is wrong on both ends.
            vars(pair_trial)["exchange"] = _exchange_wrong_data
        case "dying-pair":
            vars(pair_trial)["exchange"] = _die
        case _:
            raise ValueError(fault)


def _exchange_wrong_data(*arguments: Any) -> float:
    exchange._pattern = _wrong_data
    return exchange.exchange(*arguments)


if __name__ == "__main__":
    break_host(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
