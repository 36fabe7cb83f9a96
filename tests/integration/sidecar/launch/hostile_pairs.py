"""A pod's preflight that tests with other pods, in an image that does what it likes: this is its `sitecustomize`."""

import json
import os
import signal
import sys

_MODULE = "unbroken.preflight.in_pod"
_PORT = b'{"type":"PairState","port":9,"host":"","gpus":0,"term":0,"number":0,"has_passed":null,"why":""}\n'


def _corrupt() -> None:
    """Change what is sent to other pods, as a broken adapter does."""
    import torch.distributed as dist

    from unbroken.preflight.pair_trial import CPU_BYTES

    sound = dist.all_gather

    def broken(parts: list[object], mine: object) -> object:
        changed = mine.clone()  # type: ignore[attr-defined] # a tensor
        # A pod's own collective, which no adapter carries, has less.
        changed[17] += int(4 * changed.numel() == CPU_BYTES)
        return sound(parts, changed)

    vars(dist)["all_gather"] = broken


def _say(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


def behave(kind: str) -> None:
    """Do what is asked for in a preflight; return in any other process, and where the preflight is to go on."""
    if _MODULE not in sys.orig_argv or not kind:
        return
    if kind == "corrupt":
        _corrupt()
        return
    _say(os.environ["HOSTILE_LINE"].encode() + b"\n" + _PORT)
    if kind == "unread":
        os.close(0)
    else:
        os.read(0, 1 << 16)
    line = json.loads(os.environ["HOSTILE_PAIRS"]).encode() + b"\n"
    if kind == "exit":
        os._exit(77)
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind in ("say", "twice"):
        _say(line * (2 if kind == "twice" else 1))
    while kind == "flood":
        _say(line)
    while True:
        signal.pause()


if __name__ == "sitecustomize":
    behave(os.environ.get("HOSTILE", ""))
