"""The job's tree of ranks for people: as text of bounded length, and as a drawing while it is small."""

from collections.abc import Iterable

from unbroken.rendezvous.tree_drawing import svg_picture
from unbroken_core.conventions.printable import printable
from unbroken_core.protocol.messages import JobStatus
from unbroken_core.ranks.tree import RankTree, picture
from unbroken_core.ranks.worlds import shown_name

MAX_DRAWN_WORKERS = 1024
"""Drawing this many takes the rendezvous about 10 ms, in which it decides nothing."""


class NoPictureError(Exception):
    """There is nothing to show; the message says why."""


def tree_text(tree: RankTree | None, status: JobStatus, why: Iterable[str] = ()) -> str:
    """Return a line about the job, the reasons of the last plan, and a line per domain.

    Raises NoPictureError before the first plan.
    """
    shown = picture(_known(tree), label=_name)
    parts = [_title(status), "\n".join(map(printable, why)), shown]
    return "\n\n".join(filter(None, parts))


def tree_drawing(tree: RankTree | None, status: JobStatus) -> str:
    """Return an SVG document. Raises NoPictureError before the first plan, and for more than MAX_DRAWN_WORKERS."""
    known = _known(tree)
    if len(known) > MAX_DRAWN_WORKERS:
        raise NoPictureError(
            f"/v1/topology.svg: want at most {MAX_DRAWN_WORKERS} workers in a drawing, got {len(known)}; "
            "/v1/topology has the text"
        )
    return svg_picture(known, _title(status), label=_name)


def _known(tree: RankTree | None) -> RankTree:
    if tree is None:
        raise NoPictureError("/v1/topology: want a job with ranks, got one that has not started yet")
    return tree


def _title(status: JobStatus) -> str:
    return printable(f"{status.job}: {status.message}")


def _name(name: str) -> str:
    return printable(shown_name(name))
