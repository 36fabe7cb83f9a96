"""Output of workers: lines for the console, raw bytes for the file."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from unbroken.launch.error_file import read_error
from unbroken.launch.output import Console, Log, LogFile, Stream


class Pipes:
    """A worker's pipe and a console that is a pipe, too."""

    def __init__(self, folder: Path) -> None:
        self.read_end, self.worker = os.pipe()
        self.console_end, self.console_write = os.pipe()
        self.console = Console(self.console_write)
        self.file = LogFile(folder, 1, 0)
        self.stream = Stream(self.read_end, b"[p/1] ", self.console, Log(self.file, self.console))

    def write(self, *pieces: bytes) -> bytes:
        """Let the worker write and end; return what the console shows."""
        for piece in pieces:
            os.write(self.worker, piece)
            self.stream.pump()
        os.close(self.worker)
        self.stream.drain()
        shown = b""
        os.set_blocking(self.console_end, False)
        while self.console.has_output:
            self.console.flush_some()
            shown += os.read(self.console_end, 1 << 20)
        return shown

    def close(self) -> None:
        for descriptor in {self.console_end, self.console_write, self.console.fileno()}:
            os.close(descriptor)


@pytest.fixture
def pipes(tmp_path: Path) -> Iterator[Pipes]:
    made = Pipes(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        pytest.param([b"one\ntwo\n"], b"[p/1] one\n[p/1] two\n", id="lines"),
        pytest.param([b"on", b"e\ntw", b"o"], b"[p/1] one\n[p/1] two\n", id="a line in pieces, the last without end"),
        pytest.param([b"\r10%\r20%"], b"[p/1] \n[p/1] 10%\n[p/1] 20%\n", id="progress bar"),
        pytest.param([b"one\r", b"\ntwo\n"], b"[p/1] one\n[p/1] two\n", id="end of line that is cut in two"),
        pytest.param([b"a\x00\x07b\x1b[1mc\xff\n"], b"[p/1] a??b\x1b[1mc\xff\n", id="control characters, not colours"),
        pytest.param([b"\n"], b"[p/1] \n", id="empty line"),
    ],
)
def test_console_shows_whole_lines_with_a_prefix(pipes: Pipes, pieces: list[bytes], shown: bytes) -> None:
    """4.12, 4.17"""
    assert pipes.write(*pieces) == shown
    assert pipes.file.path.read_bytes() == b"".join(pieces)


@pytest.mark.parametrize(
    "after",
    [
        pytest.param(b"[rank0]:[W1128 07:15:10.467229802 reducer.cpp:1529] Warning: unused\n\n", id="torch"),
        pytest.param(
            b"nanobind: leaked 4 instances!\n"
            b' - leaked instance 0x7fdb1083bb28 of type "triton._C.libtriton.ir.attribute"\n'
            b'nanobind: leaked 64 types!\n - leaked type "triton._C.libtriton.ir.block"\n - ... skipped remainder\n'
            b'nanobind: leaked 514 functions!\n - leaked function "create_select"\n - ... skipped remainder\n'
            b"nanobind: this is likely caused by a reference counting issue in the binding code.\n"
            b"See https://nanobind.readthedocs.io/en/latest/refleaks.html\n",
            id="triton, which torchtitan imports",
        ),
    ],
)
def test_last_words_are_those_of_the_traceback_whatever_cpp_parts_say_after_it(pipes: Pipes, after: bytes) -> None:
    pipes.write(b"Traceback (most recent call last):\n  ...\nTypeError: train: no call\n", after)
    assert pipes.stream.last_words == b"TypeError: train: no call"


FRAMES = b'Traceback (most recent call last):\n  File "train.py", line 3, in train\n    step()\n'
TOLD = (
    b"function raised: iteration=0 rank=3\n" + FRAMES + b"KeyError: 'a'\n\n"
    b"During handling of the above exception, another exception occurred:\n\n" + FRAMES + b"ValueError: no data\n"
)
"""As `inprocess.loop.repeated_error` logs it."""


@pytest.mark.parametrize(
    ("output", "words"),
    [
        pytest.param(
            FRAMES + b"torch.AcceleratorError: CUDA error: device-side assert triggered\n"
            b"CUDA kernel errors might be asynchronously reported at some other API call.\n"
            b"Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n\n",
            b"torch.AcceleratorError: CUDA error: device-side assert triggered ... "
            b"Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
            id="message of several lines",
        ),
        pytest.param(
            b"".join(b"[rank3]: " + line + b"\n" for line in FRAMES.splitlines()) + b"[rank3]: ValueError: no\n",
            b"ValueError: no",
            id="with torch's rank",
        ),
        pytest.param(
            FRAMES + b"KeyError: 'a'\n\nDuring handling of the above exception, another exception occurred:\n\n"
            b"[step 3] loss=1\n" + FRAMES + b"KeyboardInterrupt\n",
            b"KeyboardInterrupt",
            id="of two the last one",
        ),
        pytest.param(FRAMES + b"ValueError: once\n" + b"loss=1\n" * 33 + b"end\n", b"end", id="logged long before"),
        pytest.param(FRAMES, b"step()", id="cut short"),
        pytest.param(
            b"[rank0]:   + Exception Group Traceback (most recent call last):\n"
            b'[rank0]:   |   File "train.py", line 3, in train\n'
            b"[rank0]:   | ExceptionGroup: of the loaders (2 sub-exceptions)\n"
            b"[rank0]:   +-+---------------- 1 ----------------\n"
            b"[rank0]:     | Traceback (most recent call last):\n"
            + b'[rank0]:     |   File "load.py", line 9, in load\n'
            * 40
            + b"[rank0]:     | ValueError: shard 7\n"
            b"[rank0]:     +---------------- 2 ----------------\n"
            b"[rank0]:     | KeyError: 'b'\n"
            b"[rank0]:     +------------------------------------\n",
            b"ExceptionGroup: of the loaders (2 sub-exceptions) ... KeyError: 'b'",
            id="group of exceptions",
        ),
        pytest.param(
            FRAMES + b"\x1b[1;35mNameError\x1b[0m: \x1b[35mname 'x' is not\x1b[0m\n\x1b[35mdefined\x1b[0m\n",
            b"NameError: name 'x' is not ... defined",
            id="in colours",
        ),
        pytest.param(b"\n \n", b"", id="nothing"),
        pytest.param(TOLD, b"", id="told as the fault of an iteration, in which the process stayed"),
        pytest.param(b"loss=1\n" + TOLD + b"loss=2\n", b"loss=2", id="and it went on"),
        pytest.param(TOLD + FRAMES + b"KeyError: 'a'\n", b"KeyError: 'a'", id="and ended of something else"),
        pytest.param(
            b"12:00 ERROR unbroken function raised: iteration=3 rank=0: ValueError, same as before (3x)\n",
            b"",
            id="told for the third time, in a format of the script's own",
        ),
        pytest.param(
            FRAMES + b"ValueError: " + b"x" * 900 + b"\nfix it\n",
            b"ValueError: " + b"x" * 688 + b" ... fix it",
            id="long",
        ),
    ],
)
def test_last_words_are_the_exception_and_the_last_line(pipes: Pipes, output: bytes, words: bytes) -> None:
    pipes.write(output)
    assert pipes.stream.last_words == words


def test_very_long_line_is_cut_for_the_console_and_whole_in_the_file(pipes: Pipes) -> None:
    data = b"x" * 40_000 + b"\n"
    shown = pipes.write(data)
    assert [len(line) for line in shown.split(b"\n")] == [16390, 16390, 7238, 0]
    assert pipes.file.path.read_bytes() == data


def test_log_of_a_former_process_is_never_overwritten(tmp_path: Path) -> None:
    """4.29, 4.10, 4.24"""
    files = [LogFile(tmp_path, 12, 0) for _ in range(3)]
    for number, file in enumerate(files):
        file.write(b"%d" % number)
        file.close()
    names = {path.name: path.read_bytes() for path in (tmp_path / "rank-12").iterdir()}
    assert names == {"0.log": b"0", "0.1.log": b"1", "0.2.log": b"2"}


def test_full_disk_is_told_once_and_ends_the_log_but_not_the_output(pipes: Pipes) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, pipes.file.fileno())
    os.close(full)
    shown = pipes.write(b"one\n", b"two\n")
    assert shown.count(b"No space left on device; this log ends here, the console goes on") == 1
    assert shown.endswith(b"[p/1] one\n[p/1] two\n")


def test_console_that_is_gone_costs_the_output_and_nothing_else(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    console = Console(write_end)
    console.put(b"x")
    os.close(read_end)
    console.flush_some()
    console.put(b"y")
    assert not console.has_output
    for descriptor in {write_end, console.fileno()}:
        os.close(descriptor)


def test_console_that_is_not_read_makes_workers_wait() -> None:
    read_end, write_end = os.pipe()
    console = Console(write_end)
    console.put(b"x" * (2 << 20))
    for _ in range(10):
        console.flush_some()
    assert console.is_full
    for descriptor in {read_end, write_end, console.fileno()}:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        pytest.param('{"message": {"message": "ValueError: x\\nmore", "extraInfo": {}}}', "ValueError: x", id="record"),
        pytest.param('{"message": "out of memory"}', "out of memory", id="ours"),
        pytest.param("\n  plain text\nmore", "plain text", id="text"),
        pytest.param("[1, 2]", "", id="other JSON"),
        pytest.param("", "", id="empty"),
    ],
)
def test_first_line_of_an_error_file_is_found(tmp_path: Path, text: str, error: str) -> None:
    path = tmp_path / "error.json"
    path.write_text(text)
    assert read_error(path) == error


def test_missing_error_file_is_no_error(tmp_path: Path) -> None:
    assert read_error(tmp_path / "none") == ""
