"""Reading what faulthandler wrote."""

import faulthandler
import tempfile

from unbroken_core.pod.stacks import MAX_FRAMES, parse_stack, where


def dump() -> str:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=False)
        file.seek(0)
        return file.read()


def deep(depth: int) -> str:
    return deep(depth - 1) if depth else dump()


def test_frames_are_innermost_last() -> None:
    frames = parse_stack(deep(2))
    assert [frame.split(" in ")[1] for frame in frames[-4:]] == ["deep", "deep", "deep", "dump"]
    assert all("test_stacks.py:" in frame for frame in frames[-4:])


def test_only_the_newest_stack_and_its_innermost_frames_are_kept() -> None:
    frames = parse_stack(deep(5) + deep(100))
    assert len(frames) == MAX_FRAMES
    assert frames[-1].endswith(" in dump")


def test_text_that_is_no_stack_has_no_frames() -> None:
    assert parse_stack("") == ()
    assert parse_stack('  File "half') == ()
    assert where(()) == ""


def test_place_is_named_without_the_librarys_own_frames() -> None:
    frames = ("a.py:1 in main", "b.py:2 in train", "/v/unbroken/inprocess/call.py:3 in run", "c.py:4 in step")
    assert where(frames) == "; stands at c.py:4 in step < b.py:2 in train < a.py:1 in main"
