"""`unbroken topology`: where the pods of a job stand: active, spare and lost ones, by domain."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from unbroken_cli.commands.framework import connect, find_job, job_from_cluster, make_parser, read_job_status, run
from unbroken_cli.text import UNWATCHED, doubt
from unbroken_cli.tree import tree_from_objects, tree_from_status, tree_lines


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    return run(parser(), _show, argv)


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    text = "Show where the pods of a job stand. Ranks are shown with --url: only the rendezvous knows them."
    return make_parser("topology", text)


def _show(arguments: argparse.Namespace) -> tuple[list[str], Any]:
    if arguments.url is not None:
        tree = tree_from_status(read_job_status(arguments))
        return tree_lines(tree), asdict(tree)
    cluster = connect(arguments)
    item = find_job(cluster, arguments)
    metadata = item["metadata"]
    tree = tree_from_objects(item, cluster.pods(metadata["namespace"], metadata["name"]))
    job = job_from_cluster(cluster, item)
    lines = tree_lines(tree)
    # A pod's state is its kubelet's word; who is active is that of the operator.
    if why := doubt(job):
        lines = [f"{job.title}: {why}. Roles are as of then; --url asks the rendezvous for them", *lines]
    elif job.unwatched:
        lines.append(f"PERHAPS NOT UP TO DATE: {UNWATCHED}")
    return lines, asdict(replace(tree, stale=job.stale, unwatched=job.unwatched, deleting=job.deleting))
