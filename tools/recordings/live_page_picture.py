"""Draw the live page of a real job that has lost a pod, a process and a batch: docs/live-page.png. Wants chromium.

`make live-page`; PYTHONPATH=. python -m tools.recordings.live_page_picture FILE
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from tools.recordings.browser import Browser, BrowserError, find_chromium
from tools.recordings.local_job import LocalJob, RecordingError, local_job

SCRIPT = Path(__file__).with_name("live_page_job.py")
MAX_BYTES = 200_000
WIDTH, MAX_HEIGHT = 1320, 2000
BETWEEN_S = 6.0
"""So that the faults stand apart on the axis of time."""
DOMAINS = ("a/a1", "a/a2", "a/a3", "b/b1", "b/b2", "b/b3", "a/a4", "b/b4")
OPTIONS = ("--job", "digits", "--pods", "6", "--spares", "2", "--ranks-per-pod", "2", "--layers", "rack,node")


@contextmanager
def link_of(job: LocalJob) -> Iterator[str]:
    """Run `unbroken page`; yield the link that it prints."""
    command = [sys.executable, "-m", "unbroken", "page", "-o", "json", "--url", job.url]
    pager = subprocess.Popen([*command, "--token-file", str(job.token_file)], stdout=subprocess.PIPE, text=True)
    try:
        line = "" if pager.stdout is None else pager.stdout.readline()
        if not line:
            raise RecordingError("unbroken page: want a link, it ended")
        yield json.loads(line)["link"]
    finally:
        pager.terminate()
        pager.communicate()


def break_it(job: LocalJob, breaks: Path) -> None:
    """Take a pod, a worker's process and a batch away, and wait for each recovery."""
    job.settled(0)
    time.sleep(BETWEEN_S)
    job.launcher("digits-4").send_signal(signal.SIGKILL)
    job.settled(1)
    time.sleep(BETWEEN_S)
    worker(job, "digits-1").send_signal(signal.SIGKILL)
    job.settled(2)
    time.sleep(BETWEEN_S)
    (breaks / "raise-5").touch()
    job.settled(3)
    time.sleep(BETWEEN_S)


def worker(job: LocalJob, pod: str) -> psutil.Process:
    """Return a worker's process of a pod. Raises RecordingError when there is none."""
    for process in job.launcher(pod).children(recursive=True):
        if "UNBROKEN_INCARNATION" in process.environ():
            return process
    raise RecordingError(f"want a worker of {pod}")


def draw(link: str, program: str, file: Path) -> None:
    """Write what the page shows. Raises RecordingError when the browser complains, or the file is too large."""
    with Browser(program) as browser:
        tab = browser.open(link, WIDTH, 900)
        until_s = time.monotonic() + 30
        while tab.look("document.querySelector('.state')?.textContent") != "Training":
            if time.monotonic() > until_s:
                raise RecordingError(f"want a page that shows a job, got {tab.look('document.body.innerText')!r}")
            time.sleep(0.05)
        tab.resize(WIDTH, min(int(tab.look("document.documentElement.scrollHeight")), MAX_HEIGHT))
        # Two frames later all is drawn in the new size.
        tab.look("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")
        tab.picture(file)
        if tab.complaints():
            raise RecordingError(f"the browser complains: {tab.complaints()}")
    if file.stat().st_size > MAX_BYTES:
        raise RecordingError(f"{file}: want at most {MAX_BYTES} bytes, got {file.stat().st_size}")


def main() -> int:
    """Draw the picture; the exit code."""
    program = find_chromium()
    if program is None or len(sys.argv) != 2:
        print("live_page_picture: want chromium (CHROMIUM may name it), and the file to write", file=sys.stderr)
        return 2
    file = Path(sys.argv[1]).absolute()
    # Not in the checkout: the script's path stands in the picture.
    place = Path("/tmp/digits")
    place.mkdir(exist_ok=True)
    script = place / "train.py"
    script.write_text(SCRIPT.read_text())
    os.environ["BREAKS"] = str(place)
    try:
        with local_job([*OPTIONS, "--domains", ",".join(DOMAINS), str(script)]) as job:
            break_it(job, place)
            with link_of(job) as link:
                draw(link, program, file)
    except (RecordingError, BrowserError) as error:
        print(f"live_page_picture: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(place, ignore_errors=True)
    print(f"{file}: {file.stat().st_size // 1000} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
