"""Ends of a process before it was ready that no further try changes, and what its user can change instead."""

import re

_NO_WRAPPER = re.compile(r"exited with code 0 before it completed")
_NO_RANK = re.compile(r"env:// rendezvous|KeyError: '(RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT)'")
_GROUP_BEFORE = re.compile(r"torch\.distributed is already initialised")
_MISTAKES = re.compile(
    r"\b(SyntaxError|IndentationError|ImportError|ModuleNotFoundError|NameError|TypeError): "
    # What python says of `-m NAME` and of a script that is not there.
    r"|: No module named \S+|: can't (open|find) "
)
_ADDRESS = re.compile(r"\b0x[0-9a-f]+")
_OTHER_RUNGS = "leave in-process out of restart.rungs (process,pod,world,job)"


def is_mistake(words: str) -> bool:
    """Return whether a process that ended with these words would do so again."""
    return bool(_MISTAKES.search(words)) or bool(remedy(words))


def is_same(words: str, before: str) -> bool:
    """Return whether two processes ended with the same words; addresses of objects differ each time."""
    return _ADDRESS.sub("0x", words) == _ADDRESS.sub("0x", before)


def remedy(words: str) -> str:
    """Return what to change, in a sentence; "" where only the words themselves say it."""
    if _GROUP_BEFORE.search(words):
        return "Move init_process_group inside the wrapped function"
    if _NO_WRAPPER.search(words):
        return (
            "The script does not call unbroken.inprocess.Wrapper before it trains or ends: wrap its training function, "
            f"or, for a script as written for torchrun, {_OTHER_RUNGS}"
        )
    if _NO_RANK.search(words):
        return (
            "A process has a rank only inside a function wrapped by unbroken.inprocess.Wrapper: move what needs one, "
            "such as init_process_group, into it, "
            f"or, for a script as written for torchrun, {_OTHER_RUNGS}"
        )
    return ""
