#!/usr/bin/env python3
"""Draw the pictures of docs/topology.md and write the examples' text into it: `python tools/topology_pictures.py`."""

import re
from collections.abc import Callable
from pathlib import Path

from unbroken.rendezvous.tree_drawing import svg_picture
from unbroken_core.ranks.tree import Place, RankTree, explain, picture
from unbroken_core.vocabulary.layers import Layer

PAGE = Path(__file__).parent.parent / "docs" / "topology.md"
FOLDER = PAGE.parent / "topology"

LAYERS = (
    Layer("job", replace_from=True),
    Layer("nvlink domain", min_ranks=8, max_ranks=12, replace_from=True),
    Layer("pod", min_ranks=4, replace_from=True),
)
"""Each NVLink domain has 16 GPUs, of which 12 are used: one pod of four is the neighbours' spare."""


def job(num_domains: int, max_ranks: int | None = None, divisor: int = 1) -> RankTree:
    """Return a started job of domains with four pods of four workers."""
    places = [
        Place(f"digits-{pod}", (f"nvl-{pod // 4}", f"digits-{pod}"), 4)
        for domain in range(num_domains)
        for pod in range(4 * domain, 4 * domain + 4)
    ]
    root = Layer("job", max_ranks=max_ranks, replace_from=True)
    tree = RankTree((root, *LAYERS[1:]), places, lambda size: size // divisor * divisor)
    tree.start()
    return tree


def started() -> tuple[RankTree, str, list[str]]:
    """Return the job before any loss."""
    tree = job(3)
    return tree, "After the first plan", []


def dead_gpu() -> tuple[RankTree, str, list[str]]:
    """Return the job after one worker of a pod was lost."""
    tree = job(3)
    tree.lose("digits-5", [2])
    return tree, "One GPU of digits-5 is dead: the spare pod next to it takes over", explain(tree.plan())


def dead_domain() -> tuple[RankTree, str, list[str]]:
    """Return the job after a domain fell below its minimum, with a spare domain."""
    tree = job(3, max_ranks=24)
    for pod in (4, 5, 6):
        tree.lose(f"digits-{pod}")
    return tree, "nvl-1 is below its minimum: a whole spare domain takes over", explain(tree.plan())


def no_spare() -> tuple[RankTree, str, list[str]]:
    """Return the job after more pods were lost than there are spares."""
    tree = job(3, divisor=12)
    tree.lose("digits-0")
    tree.lose("digits-1")
    tree.lose("digits-4")
    tree.lose("digits-7")
    return tree, "No spare in reach: ranks move down, and the world stays a multiple of 12", explain(tree.plan())


SCENES: dict[str, Callable[[], tuple[RankTree, str, list[str]]]] = {
    "start": started,
    "dead-gpu": dead_gpu,
    "dead-domain": dead_domain,
    "no-spare": no_spare,
}


def main() -> None:
    """Write the pictures, and between the marks of the page what `explain` and `picture` say."""
    FOLDER.mkdir(exist_ok=True)
    page = PAGE.read_text(encoding="utf-8")
    for name, scene in SCENES.items():
        tree, title, sentences = scene()
        (FOLDER / f"{name}.svg").write_text(svg_picture(tree, title), encoding="utf-8")
        text = "\n".join([*sentences, *([""] if sentences else []), picture(tree).rstrip()])
        marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        page, count = marked.subn(rf"\g<1>```text\n{text}\n```\n\g<2>", page)
        if count != 1:
            raise SystemExit(f"{PAGE}: want one pair of marks <!-- {name} --> and <!-- /{name} -->, got {count}")
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
