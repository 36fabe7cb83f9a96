"""Commands whose reader has gone, as in `unbroken local status | head -1`, and those ended by Ctrl-C."""

import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from unbroken_core.conventions.console import CLOSED_PIPE, INTERRUPTED

SOCKET = """
import sys
from unbroken_core.conventions.console import run_command
def command():
    raise BrokenPipeError("of a socket")
sys.exit(run_command(command))
"""
LONG = """
import sys
from unbroken_core.conventions.console import run_command
def command():
    for number in range(100_000):
        print(number)
    return 0
sys.exit(run_command(command))
"""

INTERRUPT = """
import os, signal, sys, time
from unbroken_core.conventions.console import run_command
def command():
    print("so far", end="")
    os.kill(os.getpid(), signal.SIGINT)
    while True:
        time.sleep(1)
sys.exit(run_command(command))
"""


def without_reader(*command: str) -> tuple[int, str]:
    """Run a command whose output nobody reads; return its exit code and its errors."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = subprocess.run(
            [sys.executable, *command], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=100, check=False
        )
    finally:
        os.close(writing)
    return ended.returncode, ended.stderr


@pytest.mark.parametrize("name", ["", *sorted(entry.name for entry in entry_points(group="unbroken.commands"))])
def test_every_command_ends_without_a_word_when_nobody_reads(name: str) -> None:
    code, errors = without_reader("-m", "unbroken", *([name] if name else []), "--help")
    # argparse does not say that it could not print its help.
    assert (code in {0, CLOSED_PIPE}, errors) == (True, "")


def test_a_command_ends_in_the_middle_of_a_long_output() -> None:
    assert without_reader("-c", LONG) == (CLOSED_PIPE, "")


def test_a_broken_connection_elsewhere_is_not_taken_for_a_reader_that_has_gone() -> None:
    ended = subprocess.run([sys.executable, "-c", SOCKET], capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 1
    assert "BrokenPipeError: of a socket" in ended.stderr


def test_a_command_that_ctrl_c_ends_says_no_more_than_it_had() -> None:
    ended = subprocess.run([sys.executable, "-c", INTERRUPT], capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (INTERRUPTED, "so far", "")
