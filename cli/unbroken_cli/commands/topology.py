"""`unbroken topology`: where the pods of a job stand: active, spare and lost ones, by domain."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from unbroken_cli.commands.framework import connect, find_job, make_parser, read_job_status, run
from unbroken_cli.tree import DomainTree, tree_from_objects, tree_from_status, tree_lines


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    return run(parser(), _show, argv)


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    text = "Show where the pods of a job stand. Ranks are shown with --url: only the rendezvous knows them."
    return make_parser("topology", text)


def _show(arguments: argparse.Namespace) -> tuple[list[str], Any]:
    tree = _read(arguments)
    return tree_lines(tree), asdict(tree)


def _read(arguments: argparse.Namespace) -> DomainTree:
    if arguments.url is not None:
        return tree_from_status(read_job_status(arguments))
    cluster = connect(arguments)
    item = find_job(cluster, arguments)
    metadata = item["metadata"]
    return tree_from_objects(item, cluster.pods(metadata["namespace"], metadata["name"]))
