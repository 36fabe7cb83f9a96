"""GPUs: what the driver says of each when asked, and what it reports by itself (XIDs)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from unbroken.watch.checks.check import Judgement, not_checked, quantity, verdicts
from unbroken.watch.counters import Key, Looks, Rises, look_again, note_times
from unbroken.watch.nvml import GpuSample
from unbroken_core.vocabulary.findings import Finding, Verdict

GPU, EVENTS = "gpu", "gpu-events"
HOLD_S: Final = 600.0
"""For so long an event, or the rise of a counter, counts."""
APPLICATION_XIDS: Final = frozenset((13, 31, 43, 45, 68, 109))
"""What a script's own mistake causes, as device plugins know them: never a fault of the device."""
FATAL_XIDS: Final = {
    48: "an uncorrectable error of its memory",
    64: "rows of its memory cannot be remapped",
    79: "the GPU has fallen off the bus",
    95: "an uncontained error of its memory",
}
SUSPECT_XIDS: Final = {
    74: "an error of NVLink",
    94: "a contained error of its memory",
    119: "its system processor does not answer",
}
FATAL_ACTIONS: Final = {1: "reset the GPU", 2: "reboot the node", 4: "drain and reset the GPU", 6: "", 7: ""}
DOMAIN_ACTIONS: Final = {3: "drain peer-to-peer traffic", 5: ""}
"""They concern the NVLink domain, not this device alone."""
_HARDWARE_SLOWDOWN: Final = 0x8 | 0x40 | 0x80
_LEAST_RECOVERIES: Final = {"nvlink-recoveries": 5}
_REPLACE: Final = "drain the node and replace the GPU"
_DOMAIN: Final = "look at the NVLink domain"


@dataclass(frozen=True)
class GpuSamples:
    """What all devices of the pod told at one time."""

    gpus: Sequence[GpuSample]
    at_s: float


@dataclass(frozen=True)
class GpuHistory:
    """What is remembered of the samples before."""

    rises: Rises = field(default_factory=Rises)
    looks: Looks = field(default_factory=dict)
    worn: frozenset[str] = frozenset()
    """Devices whose rows could not be remapped when they were seen first: training began on them all the same."""
    known: frozenset[str] = frozenset()
    links: frozenset[tuple[str, int]] = frozenset()
    """NVLinks that were active."""
    counted_links: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Those in the last number of recoveries, by device: a sum of others says nothing beside it."""


def judge_gpus(history: GpuHistory | None, sample: GpuSamples) -> Judgement:
    """Return what the devices' own words mean."""
    before = history or GpuHistory()
    counted: dict[Key, int] = {
        (gpu.uuid, name): gpu.readings[name]
        for gpu in sample.gpus
        for name in ("ecc-uncorrected", "nvlink-recoveries")
        if name in gpu.readings
    }
    active = frozenset((gpu.uuid, link) for gpu in sample.gpus for link, is_up in gpu.links.items() if is_up)
    fresh = [gpu for gpu in sample.gpus if gpu.uuid not in before.known]
    counted_links = {
        **before.counted_links,
        **{gpu.uuid: gpu.counted_links for gpu in sample.gpus if gpu.counted_links},
    }
    others = {
        (uuid, "nvlink-recoveries") for uuid, links in counted_links.items() if links != before.counted_links.get(uuid)
    }
    after = GpuHistory(
        before.rises.without(others).follow(counted, _LEAST_RECOVERIES, sample.at_s, HOLD_S),
        look_again(before.looks, {key for gpu in sample.gpus for key in _states(gpu, before)}),
        before.worn | {gpu.uuid for gpu in fresh if gpu.readings.get("remap-failed")},
        before.known | {gpu.uuid for gpu in sample.gpus},
        before.links | active,
        counted_links,
    )
    found = [finding for gpu in sample.gpus for finding in _of_gpu(gpu, after)]
    found += _untold(sample.gpus)
    num_told = sum("device" not in gpu.not_told for gpu in sample.gpus)
    return Judgement(verdicts(GPU, found, quantity(num_told, "GPU")), after)


def _states(gpu: GpuSample, before: GpuHistory) -> Iterator[Key]:
    """Yield what is amiss as a state, which may be gone in the next sample."""
    if gpu.readings.get("throttle", 0) & _HARDWARE_SLOWDOWN:
        yield (gpu.uuid, "throttled")
    if gpu.readings.get("recovery-action") in DOMAIN_ACTIONS:
        yield (gpu.uuid, "recovery-action")
    for link, is_up in gpu.links.items():
        if not is_up and (gpu.uuid, link) in before.links:
            yield (gpu.uuid, "nvlink-down")


def _of_gpu(gpu: GpuSample, history: GpuHistory) -> Iterator[Finding]:
    if gpu.lost_code:
        text = f"the driver has lost it (code {gpu.lost_code} of NVML)"
        yield Finding(GPU, gpu.uuid, Verdict.FATAL, "gpu-lost", _REPLACE, text)
        return
    yield from _of_action(gpu, history)
    yield from _of_memory(gpu, history)
    yield from _of_links(gpu, history)
    throttled = history.looks.get((gpu.uuid, "throttled"), ())
    if len(throttled) >= 3 and all(throttled):
        text = "the hardware slows it down: heat, or its power supply"
        yield Finding(GPU, gpu.uuid, Verdict.DEGRADED, "throttled", "look at cooling and power", text, 3)


def _of_action(gpu: GpuSample, history: GpuHistory) -> Iterator[Finding]:
    action = gpu.readings.get("recovery-action", 0)
    code, text = f"recovery-action-{action}", f"the driver wants: recovery action {action}"
    if action in FATAL_ACTIONS:
        yield Finding(GPU, gpu.uuid, Verdict.FATAL, code, FATAL_ACTIONS[action] or "drain the node", text)
    elif action in DOMAIN_ACTIONS:
        wanted = DOMAIN_ACTIONS[action] or _DOMAIN
        seen = sum(history.looks.get((gpu.uuid, "recovery-action"), ()))
        text = f"{text}, which concerns the NVLink domain"
        yield Finding(GPU, gpu.uuid, Verdict.SUSPECT, code, wanted, text, seen)


def _of_memory(gpu: GpuSample, history: GpuHistory) -> Iterator[Finding]:
    if gpu.readings.get("remap-failed"):
        verdict = Verdict.DEGRADED if gpu.uuid in history.worn else Verdict.FATAL
        yield Finding(GPU, gpu.uuid, verdict, "remap-failed", _REPLACE, "rows of its memory could not be remapped")
    elif gpu.readings.get("remap-pending"):
        text = "rows of its memory are to be remapped"
        yield Finding(GPU, gpu.uuid, Verdict.DEGRADED, "remap-pending", "reset the GPU", text)
    num_errors = history.rises.seen((gpu.uuid, "ecc-uncorrected"))
    if num_errors:
        text = "uncorrectable errors of its memory were counted while this pod trained"
        yield Finding(GPU, gpu.uuid, Verdict.SUSPECT, "ecc-uncorrected", "reset the GPU", text, num_errors)


def _of_links(gpu: GpuSample, history: GpuHistory) -> Iterator[Finding]:
    num_downs = sum(history.looks.get((gpu.uuid, "nvlink-down"), ()))
    if num_downs:
        down = sorted(link for link, is_up in gpu.links.items() if not is_up and (gpu.uuid, link) in history.links)
        text = f"NVLinks that were active are not: {down[:8]}"
        yield Finding(GPU, gpu.uuid, Verdict.SUSPECT, "nvlink-down", _DOMAIN, text, num_downs)
    num_rises = history.rises.seen((gpu.uuid, "nvlink-recoveries"))
    if num_rises:
        text = "NVLinks recover from errors again and again"
        yield Finding(GPU, gpu.uuid, Verdict.DEGRADED, "nvlink-errors", _DOMAIN, text, num_rises)


def _untold(gpus: Sequence[GpuSample]) -> Iterator[Finding]:
    """Yield what devices do not report: one finding for each thing, however many devices there are."""
    names = dict.fromkeys(name for gpu in gpus for name in gpu.not_told)
    for name in names:
        num_silent = sum(name in gpu.not_told for gpu in gpus)
        if name == "device":
            yield not_checked(GPU, f"{num_silent} of {len(gpus)} GPUs not looked at")
        else:
            yield Finding(GPU, "", Verdict.UNKNOWN, name, message=f"not reported by {num_silent} of {len(gpus)} GPUs")


@dataclass(frozen=True)
class XidSample:
    """Events since the last sample, the newest last."""

    events: Sequence[tuple[str, int]]
    """(UUID, XID); "" for a device that the pod does not have."""
    at_s: float
    num_gpus: int = 0
    deaf: tuple[str, ...] = ()
    """Devices whose events nobody hears."""


@dataclass(frozen=True)
class XidHistory:
    """XIDs that were seen: fatal ones for good, others for a while."""

    fatal: frozenset[tuple[str, int]] = frozenset()
    times_s: dict[Key, tuple[float, ...]] = field(default_factory=dict)


_MAX_FATAL = 64


def judge_xids(history: XidHistory | None, sample: XidSample) -> Judgement:
    """Return what the events of the driver mean."""
    before = history or XidHistory()
    fatal = {event for event in sample.events if event[0] and event[1] in FATAL_XIDS}
    others = [(uuid, str(xid)) for uuid, xid in sample.events if (uuid, xid) not in fatal]
    after = XidHistory(
        frozenset(sorted(before.fatal | fatal)[:_MAX_FATAL]),
        note_times(before.times_s, others, sample.at_s, HOLD_S),
    )
    found = [
        Finding(EVENTS, uuid, Verdict.FATAL, f"xid-{xid}", _REPLACE, f"XID {xid}: {FATAL_XIDS[xid]}")
        for uuid, xid in sorted(after.fatal)
    ]
    num_foreign = sum(len(times) for (uuid, _xid), times in after.times_s.items() if not uuid)
    if num_foreign:
        text = "events of devices that this pod does not have"
        found.append(Finding(EVENTS, "", Verdict.UNKNOWN, "foreign", message=text))
    for (uuid, xid), times in after.times_s.items():
        if uuid:
            found.append(_xid_finding(uuid, int(xid), len(times)))
    if sample.deaf:
        text = f"events of {len(sample.deaf)} of {sample.num_gpus} GPUs are not reported"
        found.append(Finding(EVENTS, "", Verdict.UNKNOWN, "deaf", message=text))
    return Judgement(verdicts(EVENTS, found, quantity(sample.num_gpus - len(sample.deaf), "GPU")), after)


def _xid_finding(uuid: str, xid: int, seen: int) -> Finding:
    code = f"xid-{xid}"
    if xid in APPLICATION_XIDS:
        return Finding(EVENTS, uuid, Verdict.OK, code, "look at the script", f"XID {xid}: the application's", seen)
    if xid in SUSPECT_XIDS:
        return Finding(EVENTS, uuid, Verdict.SUSPECT, code, "look at the GPU", f"XID {xid}: {SUSPECT_XIDS[xid]}", seen)
    return Finding(EVENTS, uuid, Verdict.DEGRADED, code, "look at the GPU", f"XID {xid}", seen)
