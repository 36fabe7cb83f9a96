"""An agent that has done its work ends with its own exit code, whenever the kubelet's signal comes."""

import subprocess
import sys

import pytest

SCRIPT = """
import asyncio, atexit, os, signal, sys
import unbroken.agent.__main__ as entry

class Agent:
    def __init__(self, config): pass
    async def run(self):
        # As the agent itself: the loop takes the handlers off when it is closed.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, print, "too early")
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, print, "too early")
        return 0

class Config:
    class directory:
        mkdir = staticmethod(lambda **_: None)
    private_directory = directory

entry.Agent, entry.read_config = Agent, Config
atexit.register(os.kill, os.getpid(), int(sys.argv[1]))
sys.exit(entry.main())
"""


@pytest.mark.parametrize("number", [15, 2])
def test_a_signal_that_comes_after_the_last_word_does_not_change_the_exit_code(number: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(number)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
