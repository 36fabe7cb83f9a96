"""`make demo`: a job survives six faults. Exit code 0 when nothing was lost, 1 when something was, 130 on Ctrl-C."""

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from pathlib import Path

from rich.console import Console, ConsoleRenderable
from rich.live import Live
from rich.text import Text

from unbroken_core.vocabulary.errors import UnbrokenError
from unbroken_local.demo.driver import Driver, Places
from unbroken_local.demo.render import Line, describe_all, describe_result
from unbroken_local.demo.snapshot import Snapshot

CHECKOUT = Path(__file__).parents[3]
RECORDING_WIDTH, RECORDING_HEIGHT = 124, 60
PLAIN_WIDTH = 120
TAIL_LINES = 100


class Screen:
    """Shows the story: a live view on a terminal, one line for each thing that happens elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.lines: list[Line] = []
        self.driver: Driver | None = None

    def tell(self, line: Line) -> None:
        """Take a line of the story."""
        self.lines.append(line)
        if not self.console.is_terminal:
            self.console.print(f"{line.at_s:6.1f} s  {line.text}", highlight=False, soft_wrap=True)

    def live(self) -> AbstractContextManager[object]:
        """Return the live view on a terminal, nothing elsewhere."""
        return Live(self, console=self.console, refresh_per_second=5) if self.console.is_terminal else nullcontext()

    def __rich__(self) -> ConsoleRenderable:
        """Return the live view as it is now; rich calls this for each frame."""
        snapshot = self.driver.snapshot if self.driver else Snapshot()
        return describe_all(snapshot, self.lines, self.console.size.height)


async def demonstrate(screen: Screen, places: Places, is_kept: bool) -> Driver:
    """Run the demonstration and return what came of it. Takes down what it started, also when it is cancelled."""
    driver = screen.driver = Driver(places, screen.tell)
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with AsyncExitStack() as stack:
        with screen.live():
            try:
                await driver.set_up(stack)
                await driver.train_through_faults()
            except UnbrokenError as error:
                driver.problems.append(str(error))
            if driver.problems:
                await driver.gather_diagnostics()
        show_end(driver, screen.console)
        if is_kept:
            show_hints(driver, screen.console)
            await asyncio.Event().wait()
        driver.say("taking the cluster down")
    return driver


def show_end(driver: Driver, console: Console) -> None:
    """Print the closing table, then what went wrong."""
    if driver.rows:
        console.print(describe_result(driver.rows))
    for problem in driver.problems:
        console.print(Text(f"demo: {problem}", style="bold red"), soft_wrap=True)
    if driver.problems:
        console.print(f"demo: logs and objects: {driver.places.diagnostics}; its end:", soft_wrap=True, markup=False)
        console.print(_tail(driver.places.diagnostics), soft_wrap=True, markup=False, highlight=False)


def _tail(file: Path) -> str:
    return "\n".join(file.read_text(encoding="utf-8").splitlines()[-TAIL_LINES:]) if file.is_file() else "(not written)"


def show_hints(driver: Driver, console: Console) -> None:
    """Print how to play with what is left up."""
    for line in (
        "left up; in another terminal:",
        f"  export KUBECONFIG={driver.cluster.kubeconfig}",
        f"  export PATH={Path(sys.executable).parent}:$PATH",
        "  kubectl get rtj,pods -o wide",
        "  kubectl describe rtj digits",
        "once more, from the first step:",
        "  kubectl delete rtj digits",
        f"  rm -r {driver.places.data}/checkpoints {driver.places.control}/step-seconds",
        f"  kubectl apply -f {driver.places.output}/digits.yaml",
        "break it while it trains:",
        "  kubectl delete pod NAME",
        f"  unbroken local node fail NAME --dir {driver.cluster.folder}",
        "Ctrl-C here takes it down.",
    ):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def record(driver: Driver, lines: Sequence[Line], file: Path) -> None:
    """Write the view after the node's loss, the rest of the story and the closing table as an SVG picture."""
    with Path("/dev/null").open("w") as nowhere:
        console = Console(
            record=True, width=RECORDING_WIDTH, file=nowhere, force_terminal=True, color_system="truecolor"
        )
        console.print(describe_all(driver.memorable, lines, RECORDING_HEIGHT))
        console.print(describe_result(driver.rows))
        file.write_text(console.export_svg(title="make demo"), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m unbroken_local.demo", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave cluster and operator up until Ctrl-C")
    parser.add_argument(
        "--output", type=Path, default=CHECKOUT / "demo-output", help="folder for state and logs; emptied"
    )
    parser.add_argument("--svg", type=Path, help="also write a picture of the end to this file")
    options = parser.parse_args(arguments)
    screen = Screen(Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH))
    try:
        driver = asyncio.run(demonstrate(screen, Places(CHECKOUT, options.output.resolve()), options.keep))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    if options.svg and not driver.problems:
        record(driver, screen.lines, options.svg)
    return 1 if driver.problems else 0


if __name__ == "__main__":
    sys.exit(main())
