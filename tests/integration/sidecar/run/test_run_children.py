"""What a run leaves behind: nothing."""

import subprocess
import sys

from tests.processes import is_gone

SCRIPT = """
import asyncio, os, signal, threading
from unbroken.run.children import Children

kill = os.kill
killed = set()

def kill_slowly(pid, number):
    # As the kernel does where much memory is to be freed, or no processor is free.
    if pid not in killed:
        killed.add(pid)
        timer = threading.Timer(0.5, kill, (pid, number))
        timer.daemon = True
        timer.start()

def be_told_while_it_closes(loop):
    # A kernel tells of the last process when it likes.
    close = loop._close_self_pipe

    def close_and_be_told():
        close()
        kill(os.getpid(), signal.SIGCHLD)

    loop._close_self_pipe = close_and_be_told

async def main():
    be_told_while_it_closes(asyncio.get_running_loop())
    children = Children()
    child = children.start("parent", ["sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo $!"], os.environ, None)
    await child.ended
    os.kill = kill_slowly
    await children.kill_leftovers()

asyncio.run(main())
"""


def test_run_ends_after_the_processes_that_its_parts_left_behind() -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    assert is_gone(int(ended.stdout))
    assert ended.stderr == ""
