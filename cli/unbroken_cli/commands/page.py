"""`unbroken page`: opens the live page of a job in a browser: where its ranks are, and what happened to them."""

import argparse
import json
import signal
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from unbroken_cli.commands.framework import complain, connect, find_job, make_parser
from unbroken_cli.commands.reaching import reach_rendezvous
from unbroken_cli.errors import CommandError
from unbroken_cli.page_proxy.server import PageAnswer, PageProxy
from unbroken_cli.page_proxy.upstream import RendezvousAccess, ask
from unbroken_cli.sources.rendezvous import read_token
from unbroken_core.conventions.printable import printable
from unbroken_core.vocabulary.errors import InputError

Ask = Callable[[str], PageAnswer]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns the exit code: 0 ended by Ctrl-C, 1 not reachable, 2 bad input."""
    made = parser()
    arguments = made.parse_args(argv)
    signal.signal(signal.SIGTERM, _end)
    try:
        with _reach(arguments) as ask_page:
            _serve(arguments, ask_page)
    except (InputError, CommandError) as error:
        complain(made.prog, error)
        return 2 if isinstance(error, InputError) else 1
    except KeyboardInterrupt:
        return 0
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    made = make_parser("page", "Show a job live in a browser on this machine, until Ctrl-C. Reads; changes nothing.")
    made.add_argument("--port", type=int, default=0, help="of this machine, to listen on (any that is free)")
    made.add_argument("--open", action="store_true", help="open the browser, too")
    return made


def _end(_number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _serve(arguments: argparse.Namespace, ask_page: Ask) -> None:
    first = ask_page("/page/status")
    if first.status != 200:
        hints = {401: ": give the token of this job", 404: ": it has no page; is it of an earlier release?"}
        raise CommandError(f"the rendezvous answers {first.status}{hints.get(first.status, '')}")
    try:
        job = str(json.loads(first.body)["status"]["job"])
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError("the rendezvous gives an unreadable answer; is it of another release?") from error
    if arguments.job not in (None, job):
        raise InputError(f"JOB: the rendezvous {arguments.url} serves {job!r}, got {arguments.job!r}")

    def show_link(link: str) -> None:
        _print(arguments, job, link, "for another browser")

    proxy = PageProxy(ask_page, arguments.port, show_link)
    _print(arguments, job, proxy.link, "opens once; Ctrl-C ends it")
    if arguments.open:
        webbrowser.open(proxy.link)
    proxy.serve()


def _print(arguments: argparse.Namespace, job: str, link: str, note: str) -> None:
    text = json.dumps({"job": job, "link": link}) if arguments.output == "json" else f"{job}: {link}   ({note})"
    print(printable(text), flush=True)


@contextmanager
def _reach(arguments: argparse.Namespace) -> Iterator[Ask]:
    """Yield what asks the job's rendezvous."""
    if arguments.url is not None:
        yield lambda path: ask(_access(arguments), path)
        return
    cluster = connect(arguments)
    metadata = find_job(cluster, arguments)["metadata"]
    with reach_rendezvous(cluster, arguments, metadata["namespace"], metadata["name"]) as inside:
        yield inside.ask


def _access(arguments: argparse.Namespace) -> RendezvousAccess:
    """Read the files at each question: they may be replaced."""
    if arguments.token_file is None:
        raise InputError("--url: needs --token-file, the file with the job's token")
    try:
        authorities = None if arguments.ca_file is None else arguments.ca_file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--ca-file {arguments.ca_file}: cannot be read: {error}") from error
    return RendezvousAccess(arguments.url, read_token(arguments.token_file), authorities)
