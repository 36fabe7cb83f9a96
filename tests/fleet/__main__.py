"""Draw the pictures of docs/dashboards.md: python -m tests.fleet [--seconds 480] [--seed 7]."""

import argparse
import asyncio
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fleet.run import SCRAPE_S, Watched, watched_fleet

ROOT = Path(__file__).parents[2]
DRAW = ROOT / "tools" / "dashboard_pictures" / "draw.mjs"


def main() -> int:
    """Run the fleet, then draw; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fleet", description="A fleet that breaks, in pictures.")
    parser.add_argument("--seconds", type=float, default=480.0, help="so long the fleet is broken (default 480)")
    parser.add_argument("--seed", type=int, default=7, help="chooses ranks and times of the faults (default 7)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "dashboards", help="folder of the pictures")
    parser.add_argument("--keep", type=Path, help="folder for Prometheus' data, which then stays")
    parser.add_argument("--helm", default=shutil.which("helm"), help="program (default: the one in PATH)")
    options = parser.parse_args()
    if options.helm is None or None in map(shutil.which, ("prometheus", "node")):
        print("fleet: want the programs helm (tools/get-helm.sh), prometheus and node", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as temporary:
        keep = options.keep or Path(temporary)
        keep.mkdir(parents=True, exist_ok=True)
        return asyncio.run(_draw(options.helm, keep, options.seconds, options.seed, options.out))


async def _draw(helm: str, keep: Path, seconds: float, seed: int, out: Path) -> int:
    async with watched_fleet(helm, keep, seconds, seed) as seen:
        command = draw_command(seen, out)
        print(" ".join(command), flush=True)
        return (await asyncio.to_thread(subprocess.run, command, check=False)).returncode


def draw_command(seen: Watched, out: Path) -> list[str]:
    """Return the command that draws what was seen."""
    span = [f"--from={seen.started_s:.0f}", f"--to={seen.ended_s:.0f}", f"--out={out}"]
    chosen = ["--var=job.namespace=research", "--var=job.training_job=llama"]
    return ["node", str(DRAW), f"--prometheus={seen.url}", *span, f"--interval={SCRAPE_S:.0f}", *chosen]


if __name__ == "__main__":
    sys.exit(main())
