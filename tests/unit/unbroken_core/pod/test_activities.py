"""What a stack says of a worker: does it wait for others, or they for it?"""

import random
import string

import pytest

from unbroken_core.pod.activities import Reading, place_of, read
from unbroken_core.pod.pod_messages import MainThread
from unbroken_core.protocol.bounds import MAX_PLACE
from unbroken_core.vocabulary.reasons import Doing

SITE = "/usr/lib/python3.11/site-packages"
STD = "/usr/lib/python3.11"
TRAIN = "/home/me/train.py:41 in load_batch"
LOOP = (
    "/home/me/train.py:90 in <module>",
    f"{SITE}/unbroken/inprocess/wrap.py:50 in __call__",
    f"{SITE}/unbroken/inprocess/loop/call.py:200 in _run_function",
    "/home/me/train.py:60 in train",
)
OWN = Reading(Doing.OWN_CODE, "train.py:41 load_batch")


def thread(*stack: str, call: str = "", may_wait: bool | None = None, beside: str = "") -> MainThread:
    return MainThread(0, (*LOOP, *stack), call, may_wait, beside)


@pytest.mark.parametrize(
    ("seen", "is_blocked", "reading"),
    [
        pytest.param(thread(TRAIN, call="sleep", may_wait=False), True, OWN, id="time.sleep"),
        pytest.param(thread(TRAIN), False, OWN, id="runs Python code"),
        pytest.param(
            thread(TRAIN), True, Reading(Doing.UNKNOWN, "train.py:41 load_batch"), id="blocked, nobody knows in what"
        ),
        pytest.param(
            thread(TRAIN, call="wait", may_wait=True),
            True,
            Reading(Doing.WAITING, "wait()"),
            id="work.wait() has no frame",
        ),
        pytest.param(
            thread(TRAIN, call="item", may_wait=True),
            True,
            Reading(Doing.WAITING, "item()"),
            id="nor has tensor.item()",
        ),
        pytest.param(thread(TRAIN, f"{STD}/threading.py:320 in wait"), True, OWN, id="waits for a thread of its own"),
        pytest.param(
            thread(TRAIN, f"{STD}/threading.py:320 in wait", beside="barrier"),
            True,
            Reading(Doing.WAITING, "barrier"),
            id="that thread waits in a collective",
        ),
        pytest.param(thread(TRAIN, beside="barrier"), False, OWN, id="it does not wait for that thread"),
        pytest.param(
            thread(
                TRAIN,
                f"{SITE}/torch/distributed/c10d_logger.py:83 in wrapper",
                f"{SITE}/torch/distributed/distributed_c10d.py:3000 in all_reduce",
            ),
            True,
            Reading(Doing.COLLECTIVE, "all_reduce"),
            id="all_reduce",
        ),
        pytest.param(
            thread(
                TRAIN,
                f"{SITE}/torch/distributed/distributed_c10d.py:3000 in barrier",
                f"{SITE}/torch/distributed/distributed_c10d.py:50 in _wait",
                f"{STD}/threading.py:320 in wait",
            ),
            True,
            Reading(Doing.COLLECTIVE, "barrier"),
            id="a collective waits in the standard library",
        ),
        pytest.param(
            thread(
                "/home/me/train.py:70 in step",
                f"{SITE}/torch/distributed/distributed_c10d.py:3000 in all_gather_object",
                "/home/me/train.py:41 in load_batch",
            ),
            False,
            OWN,
            id="a collective calls the script",
        ),
        pytest.param(
            thread(
                TRAIN,
                f"{SITE}/torch/distributed/_functional_collectives.py:140 in wait_tensor",
                f"{SITE}/torch/_ops.py:1100 in __call__",
            ),
            True,
            Reading(Doing.COLLECTIVE, "wait_tensor"),
            id="functional collective",
        ),
        pytest.param(
            thread(
                TRAIN,
                f"{SITE}/torch/_tensor.py:600 in backward",
                f"{SITE}/torch/autograd/graph.py:800 in _engine_run_backward",
            ),
            True,
            Reading(Doing.WAITING, "backward"),
            id="backward",
        ),
        pytest.param(
            thread(
                f"{SITE}/torch/autograd/graph.py:800 in _engine_run_backward",
                f"{SITE}/torch/autograd/function.py:300 in apply",
                "/home/me/train.py:41 in load_batch",
                call="sleep",
                may_wait=False,
            ),
            True,
            OWN,
            id="a hook of the script in backward",
        ),
        pytest.param(
            thread(TRAIN, f"{SITE}/torch/cuda/__init__.py:900 in synchronize"),
            True,
            Reading(Doing.WAITING, "synchronize"),
            id="torch.cuda.synchronize",
        ),
        pytest.param(
            thread(
                TRAIN,
                f"{SITE}/torch/utils/data/dataloader.py:1200 in _try_get_data",
                f"{STD}/multiprocessing/queues.py:113 in get",
                f"{STD}/selectors.py:415 in select",
            ),
            True,
            Reading(Doing.DATA_LOADER, "train.py:41 load_batch"),
            id="data loader",
        ),
        pytest.param(
            thread(TRAIN, f"{SITE}/torch/serialization.py:900 in save"),
            True,
            Reading(Doing.IO, "train.py:41 load_batch"),
            id="torch.save",
        ),
        pytest.param(
            thread(TRAIN, f"{STD}/socket.py:705 in readinto"),
            True,
            Reading(Doing.IO, "train.py:41 load_batch"),
            id="a socket",
        ),
        pytest.param(MainThread(0, LOOP[:3]), True, Reading(Doing.UNKNOWN), id="the function was left"),
        pytest.param(MainThread(0, ()), True, Reading(Doing.UNKNOWN), id="no frames"),
    ],
)
def test_what_a_stack_says(seen: MainThread, is_blocked: bool, reading: Reading) -> None:
    assert read(seen, is_blocked) == reading


def test_any_frames_are_read_and_what_is_said_of_them_is_bounded() -> None:
    rng = random.Random(5)
    parts = [":", " in ", "/", "torch", "distributed", "\x1b[2J", "\n", "7", "é", "\udc80", *string.ascii_letters]
    for _turn in range(2000):
        frames = tuple("".join(rng.choices(parts, k=rng.randint(0, 60))) * rng.randint(1, 5) for _frame in range(4))
        reading = read(MainThread(0, frames), rng.random() < 0.5)
        assert len(reading.what) <= MAX_PLACE
        assert len(place_of(frames)) <= MAX_PLACE
