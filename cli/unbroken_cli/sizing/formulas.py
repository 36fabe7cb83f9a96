"""Closed forms: what the literature says of such a job. The simulation is tested against them."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np


def mttf_s(num_nodes: float, faults_per_1000_node_days: float) -> float:
    """Return the mean time between faults of a job on so many nodes (Kokolis et al. 2024, section on MTTF)."""
    return 86400.0 * 1000.0 / (num_nodes * faults_per_1000_node_days)


def rsc_ettr(num_nodes: float, faults_per_1000_node_days: float, restart_s: float, interval_s: float) -> float:
    """Return RSC's estimate of ETTR: each fault costs a restart and half an interval (Kokolis et al. 2024)."""
    return max(1.0 - (restart_s + interval_s / 2) / mttf_s(num_nodes, faults_per_1000_node_days), 0.0)


def daly_ettr(mtbf_s: float, blocking_s: float, restart_s: float, interval_s: float) -> float:
    """Return work / wall of Daly's complete model: faults also strike during checkpoints and restarts (Daly 2006)."""
    if math.isinf(mtbf_s):
        return interval_s / (interval_s + blocking_s)
    exponent = (interval_s + blocking_s) / mtbf_s
    if exponent + restart_s / mtbf_s > 700:
        return 0.0
    return interval_s / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1(exponent))


def daly_interval_s(mtbf_s: float, blocking_s: float) -> float:
    """Return Daly's higher-order estimate of the best interval between checkpoints, without their own time."""
    if blocking_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = math.sqrt(blocking_s / (2 * mtbf_s))
    return math.sqrt(2 * blocking_s * mtbf_s) * (1 + ratio / 3 + ratio * ratio / 9) - blocking_s


def poisson_quantile(mean: float, share: float) -> int:
    """Return the least number that a Poisson variable does not exceed with this probability.

    With independent faults, the number of nodes out for repair is Poisson, whatever the repair's distribution.
    """
    if mean > 500:
        # Wilson and Hilferty would do better; at this size the normal distribution is right to one node in a thousand.
        return math.ceil(mean + 2.3263478740408408 * math.sqrt(mean)) if share == 0.99 else math.ceil(mean)
    term = total = math.exp(-mean)
    count = 0
    while total < share and count < 10_000:
        count += 1
        term *= mean / count
        total += term
    return count


class Batch(NamedTuple):
    """What one fault takes out together."""

    nodes: int
    """That a common cause may strike."""
    share: float
    """Probability of each of them to be struck."""


def batched_quantile(means: Mapping[Batch, float], share: float, most: int) -> int:
    """Return the least number of nodes, up to `most`, that those out at any moment do not exceed with this probability.

    `means` has the mean number of faults of each kind that are not repaired yet. Each is Poisson, so all the nodes are
    a compound Poisson number: its distribution comes from its characteristic function.
    """
    mean = sum(count * batch.nodes * batch.share for batch, count in means.items())
    if mean >= most:
        return most
    variance = sum(
        count * ((batch.nodes * batch.share) ** 2 + batch.nodes * batch.share * (1 - batch.share))
        for batch, count in means.items()
    )
    # Not one in a hundred lies further off than ten standard deviations (Chebyshev); what wraps around is less still.
    reach = min(most, math.ceil(mean + 10 * math.sqrt(variance)) + 10)
    length = 1 << (4 * reach).bit_length()
    angles = -2j * np.pi / length * np.arange(length // 2 + 1)
    exponent = np.zeros(length // 2 + 1, np.complex128)
    for batch, count in means.items():
        exponent += count * ((1 - batch.share + batch.share * np.exp(angles)) ** batch.nodes - 1)
    below = np.cumsum(np.fft.irfft(np.exp(exponent), length))
    found = int(np.argmax(below >= share - 1e-9)) if below[reach] >= share - 1e-9 else reach
    return min(found, most)
