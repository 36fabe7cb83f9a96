"""The live page in a real Chromium: what it shows of a job, and what it does not let in."""

import http.client
import json
import os
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.answers import ask
from tests.integration.cli.kubectl_standin import kubectl_standin
from tests.integration.cli.page_job import TOKEN, PageJob, page_job
from tests.waiting import LIMIT_S, wait_until
from tools.recordings.browser import Browser, BrowserError, Tab, find_chromium

from unbroken.run.loopback_block import LoopbackBlock
from unbroken_cli.page_proxy.server import PageAnswer, PageProxy
from unbroken_core.conventions.page_headers import PAGE_HEADERS
from unbroken_core.protocol.settings import JobSettings, Timeouts
from unbroken_core.protocol.wire import encode
from unbroken_core.vocabulary.checkpoints import MemoryStatus
from unbroken_core.vocabulary.layers import Layer

MARKUP = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
SETTINGS = JobSettings(
    "digits",
    replicas=3,
    spares=1,
    ranks_per_pod=2,
    layers=(Layer("rack", "test/rack"), Layer("node", "test/node")),
    no_progress_limit=1000,
    timeouts=Timeouts(heartbeat_s=600, soft_s=3600, hard_s=7200, barrier_s=14400, startup_s=600, last_call_s=600),
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start Chromium once for all tests here."""
    program = find_chromium()
    if program is None:
        pytest.skip("chromium is not installed; CHROMIUM may name it")
    with Browser(program) as made:
        yield made


@pytest.fixture
def job(tmp_path: Path) -> Iterator[PageJob]:
    """Start a rendezvous with four pods in two racks, of which one is a spare and one has a name that is markup."""
    block = LoopbackBlock()
    with page_job(SETTINGS, block.rendezvous, tmp_path) as made:
        for pod, domains in enumerate((("a", "a0"), ("a", "a1"), ("b", MARKUP), ("b", "b1"))):
            made.join(f"digits-{pod}", *domains)
        yield made
    block.release()


class Pager:
    """`unbroken page` as a process."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        command = [sys.executable, "-m", "unbroken", "page", "-o", "json", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **variables})

    def link(self) -> str:
        """Return the next link that it prints."""
        assert self.process.stdout is not None
        return str(json.loads(self.process.stdout.readline())["link"])


@contextmanager
def pager(job: PageJob) -> Iterator[Pager]:
    """Run `unbroken page` for a job; it ends well when it is told to."""
    wait_until(lambda: get(job.url, "/v1/status")[0] == 200, "a rendezvous")
    made = Pager("--url", job.url, "--token-file", str(job.folder / "token"))
    yield made
    made.process.terminate()
    assert made.process.wait(LIMIT_S) == 0
    assert made.process.stdout is not None
    made.process.stdout.close()


def get(origin: str, path: str, token: str | None = TOKEN, **headers: str) -> tuple[int, str]:
    """Return status and text of what a server answers; 0 while there is none."""
    return ask(_request(origin, path, token, **headers))


def _request(origin: str, path: str, token: str | None, **headers: str) -> urllib.request.Request:
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    return urllib.request.Request(f"{origin}{path}", headers=headers)


def see(tab: Tab, expression: str, what: str) -> Any:
    """Wait until JavaScript in the page is true, and return its value."""

    def look() -> Any:
        try:
            return tab.look(expression)
        except BrowserError:
            return None  # The proxy leads on to the page: a question on the way finds neither.

    return wait_until(look, what, describe=lambda: str(tab.look("document.body.innerText")))


def is_state(word: str) -> str:
    """Return JavaScript that says whether the page shows this state."""
    return f"document.querySelector('.state')?.textContent === {json.dumps(word)}"


def is_term(number: int) -> str:
    """Return JavaScript that says whether the page shows what a rendezvous of this term says."""
    return f"document.querySelector('footer')?.textContent.includes('term {number};')"


RANKS = "[...document.querySelectorAll('.pod .cell.training')].map((cell) => cell.textContent).sort().join(' ')"
NUM_RECOVERIES = "document.querySelectorAll('.recoveries > li').length"


def test_page_shows_the_job_and_goes_on_without_a_reload_through_faults_and_a_new_rendezvous(
    browser: Browser, job: PageJob
) -> None:
    """Every rank is there, text of the job stays text, nothing is asked of anybody else."""
    with pager(job) as made:
        tab = browser.open(made.link())
        see(tab, is_state("Training"), "a job that trains")
        tab.look("window.isTheSame = true")
        assert tab.look(RANKS) == "0 1 2 3 4 5"
        described = tab.look("[...document.querySelectorAll('.pod .unseen')].map((pod) => pod.textContent)")
        assert sorted(described) == [
            "digits-0 on a0: ranks 0–1, trains",
            "digits-1 on a1: ranks 2–3, trains",
            # A host that no host can be called is shown as a name that one could.
            "digits-2 on script-window.hacked-1-script-img-src-x-onerror-window.hacked-2: ranks 4–5, trains",
            "digits-3 on b1: spare",
        ]
        stack = ("/app/train.py:12 in main", f"/app/{MARKUP}.py:7 in step")
        job.fail("digits-1", 1, f"ValueError: {MARKUP}", stack)
        see(tab, f"{NUM_RECOVERIES} === 1 && {is_state('Training')}", "the recovery")
        assert tab.look("document.querySelector('.evidence .what').textContent") == f"ValueError: {MARKUP}"
        frames = tab.look("[...document.querySelectorAll('.stack code')].map((frame) => frame.textContent)")
        assert frames == [f"step  /app/{MARKUP}.py:7", "main  /app/train.py:12"]
        assert "rank 3 in digits-1" in tab.look("document.querySelector('.recoveries summary').textContent")
        job.fail_all("digits-2", "ValueError: first", f"ValueError: {MARKUP}")
        see(tab, f"{NUM_RECOVERIES} === 2 && {is_state('Training')}", "the recovery from two faults")
        others = tab.look("[...document.querySelectorAll('.recoveries .evidence li')].map((item) => item.textContent)")
        assert others == [f"rank 5 of digits-2: exception (ValueError: {MARKUP})"]
        job.leave("digits-0")
        see(tab, f"{NUM_RECOVERIES} === 3 && {is_state('Training')}", "the recovery from a lost pod")
        assert tab.look(RANKS) == "0 1 2 3 4 5"

        job.kill()
        see(tab, is_state("Training?"), "that nobody answers")
        job.start()
        see(tab, f"{is_term(2)} && {is_state('Training')}", "the next rendezvous")
        job.fail("digits-2", 0, "ValueError: again", ())
        see(tab, f"{NUM_RECOVERIES} === 4", "what the next rendezvous tells, beside what the former did")
        assert tab.look("window.isTheSame") is True
        assert tab.look("window.hacked") is None
        assert tab.look("document.querySelectorAll('body script, img').length") == 0
        assert [text for text in tab.complaints() if "/page/status" not in text] == []
        origin = "http://" + urlsplit(tab.look("location.href")).netloc
        assert all(address.startswith(f"{origin}/") for address in tab.requests())
        assert TOKEN not in tab.look("document.documentElement.outerHTML + document.cookie")
        tab.close()


def test_nobody_reads_the_page_without_the_token_or_the_cookie(job: PageJob) -> None:
    with pager(job) as made:
        for token, status in ((None, 401), ("wrong", 401), (TOKEN, 200)):
            assert get(job.url, "/page/status", token)[0] == status
        with urllib.request.urlopen(_request(job.url, "/page/status", TOKEN), timeout=30) as response:
            assert PAGE_HEADERS.items() <= dict(response.headers).items()
        # The page's files are those of the command, never the job's.
        assert get(job.url, "/page/")[0] == get(job.url, "/page/main.js")[0] == 404
        assert get(job.url, "/page/status?after=x")[0] == 400
        link = urlsplit(made.link())
        origin = f"http://{link.netloc}"
        for path in ("/page/", "/page/status", "/", "/v1/status", "/enter/guessed"):
            assert get(origin, path)[0] == 401, path
        assert get(origin, "/page/", Host="evil.example")[0] == 403
        connection = http.client.HTTPConnection(link.netloc)
        connection.request("GET", link.path)
        response = connection.getresponse()
        cookie = str(response.getheader("Set-Cookie")).partition(";")[0]
        response.read()
        expected = {"/page/": 200, "/page/main.js": 200, "/page/status": 200, "/page/no.js": 404, "/v1/status": 404}
        for path, status in {**expected, link.path: 401}.items():
            connection.request("GET", path, headers={"Cookie": cookie})
            response = connection.getresponse()
            body = response.read()
            assert response.status == status, body
            assert PAGE_HEADERS.items() <= dict(response.getheaders()).items()
        connection.request("POST", "/page/status", body=b"x", headers={"Cookie": cookie})
        assert connection.getresponse().status == 501
        connection.close()
        assert made.link() != link.geturl()


def test_thousands_of_pods_are_told_by_their_domains_and_those_in_trouble_by_name(browser: Browser) -> None:
    status = _large_status(4096)
    with _proxy(lambda: status) as proxy:
        tab = browser.open(proxy.link)
        see(tab, is_state("Training"), "the page")
        assert tab.look("document.querySelectorAll('*').length") < 4000
        assert tab.look("document.querySelectorAll('.domain .domain').length") == 128
        assert tab.look(
            "[...document.querySelectorAll('.domain .domain[open] .name')].map((one) => one.textContent)"
        ) == ["r62"]
        assert tab.look("document.querySelector('.troubles').innerText") == (
            "1 pod to look at\ndigits-2000 on r62: ranks 16000–16007, process ended"
        )
        # By the keyboard alone, and it stays so when the next status comes.
        tab.look("document.querySelector('.domain .domain summary').focus()")
        for kind in ("keyDown", "keyUp"):
            tab.call(
                "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", text="\r", windowsVirtualKeyCode=13
            )
        is_open = "document.querySelector('.domain .domain').open && document.querySelectorAll('.dots').length > 2"
        see(tab, is_open, "the box that was opened")
        status["status"] = {**status["status"], "revision": 2, "message": "another one"}
        see(tab, "document.querySelector('.message').textContent === 'another one'", "the next status")
        assert tab.look(is_open)
        assert tab.look("document.activeElement === document.querySelector('.domain .domain summary')")
        assert tab.complaints() == []
        tab.close()


def test_page_shows_which_step_is_safe_and_where(browser: Browser) -> None:
    """Of a job with checkpoints in memory; what it says of them is text, whatever it is."""
    answer = _large_status(8)
    told = MemoryStatus(1120, 1110, 1100, 1, "memory", across="across rack", disk_step=1000, disk_every=1000)
    note = "document.querySelector('.figure:last-child small')?.textContent"
    with _proxy(lambda: answer) as proxy:
        tab = browser.open(proxy.link)
        see(tab, is_state("Training"), "the page")
        assert "on all ranks" not in tab.look("document.querySelector('.figures').textContent")

        def tell(memory: MemoryStatus, revision: int) -> None:
            shown = json.loads(encode(memory))
            answer["status"] = {**answer["status"], "max_step": 1122, "memory": shown, "revision": revision}

        tell(told, 2)
        see(tab, f"{note}?.includes('on all ranks')", "what is safe")
        assert tab.look(note) == (
            "on all ranks, 2 steps ago; step 1,110 protected across rack; step 1,000 on the disk; "
            "restored last: step 1,100 from memory, 1 step redone"
        )
        assert tab.look("document.querySelector('.figure:last-child b').textContent") == "1,120"
        tell(MemoryStatus(-1, across="across rack", reason=MARKUP, disk_every=5, disk_problem=MARKUP), 3)
        see(tab, f"{note}?.includes('no checkpoint')", "that none is")
        assert tab.look(note) == (
            "no checkpoint is on all ranks yet; none is protected yet, wanted across rack; "
            f"none on the disk: {MARKUP}; {MARKUP}"
        )
        assert tab.look("window.hacked") is None
        tell(MemoryStatus(1120, -1, -1, 19, "nothing"), 4)
        see(tab, f"{note}?.includes('nothing was restored, 19 steps redone')", "that all was lost")
        tell(MemoryStatus(1120, source="nothing"), 5)
        see(tab, f"{note} === 'on all ranks, 2 steps ago'", "no word of that where there was nothing")
        tab.close()


def test_model_places_lost_ranks_where_they_were_and_keeps_what_a_former_rendezvous_told(browser: Browser) -> None:
    answer = _large_status(8)
    with _proxy(lambda: answer) as proxy:
        tab = browser.open(proxy.link)
        see(tab, is_state("Training"), "the page")
        tab.look(
            f"import('/page/model.js').then((model) => {{ window.model = model; window.first = {json.dumps(answer)} }})"
        )
        found = tab.look(
            """(() => {
              const recovery = {number: 1, pod: 'digits-1', rank: 8, domain: 'r0', ended_at: '', phase_s: {}};
              const [, before] = model.digest(first, model.emptyMemory());
              const status = {...first.status, phase: 'interrupted', recoveries: [recovery],
                              pods: first.status.pods.filter((pod) => pod.pod !== 'digits-1')};
              const [view, memory] = model.digest({...first, status}, before);
              const lost = view.pods.filter((pod) => pod.kind === 'lost');
              const fresh = model.digest({...first, status}, model.emptyMemory())[0];
              const unknown = fresh.pods.find((pod) => pod.kind === 'lost');
              const next = {...first, status: {...first.status, term: 2}};
              const [later] = model.digest(next, memory);
              return {
                lost: lost.map(({name, domains, ranks, isCulprit}) => [name, domains, ranks.length, isCulprit]),
                unknown: [unknown.name, unknown.domains, unknown.ranks.length],
                state: view.state.word, running: view.running.number,
                later: [later.running, later.recoveries.map((one) => [one.key, one.isCut]), later.restarts.length],
              };
            })()"""
        )
        assert found == {
            "lost": [["digits-1", ["zone-0", "r0"], 8, True]],
            "unknown": ["digits-1", ["zone-0", "r0"], 8],
            "state": "Recovering",
            "running": 1,
            "later": [None, [["1.1", True]], 1],
        }
        tab.close()


def test_way_into_the_cluster_is_made_again_when_it_has_ended(tmp_path: Path, job: PageJob) -> None:
    from unbroken_cli.errors import CommandError
    from unbroken_cli.page_proxy.upstream import ClusterRendezvous, PortForward

    wait_until(lambda: get(job.url, "/v1/status")[0] == 200, "a rendezvous")
    with kubectl_standin(tmp_path, STANDIN_TARGET=job.listen) as asked:
        secrets = iter(("d3Jvbmd3cm9uZ3dyb25nd3Jvbmc=", "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="))
        inside = ClusterRendezvous(
            lambda: {"metadata": {"name": "digits-rendezvous"}, "data": {"token": next(secrets)}},
            PortForward(["port-forward", "service/x"]),
        )
        try:
            # The first token is wrong: the Secret was replaced, and is read again.
            assert inside.ask("/page/status").status == 200
            job.kill()
            with pytest.raises(CommandError, match="the rendezvous does not answer"):
                inside.ask("/page/status")
            job.start()
            wait_until(lambda: get(job.url, "/v1/status")[0] == 200, "the next rendezvous")
            assert inside.ask("/page/status").status == 200
        finally:
            inside.close()
        assert asked.read_text() == "port-forward service/x\n" * 2
    with (
        kubectl_standin(tmp_path, STANDIN_ERROR="error: forbidden"),
        pytest.raises(CommandError, match=re.escape("kubectl port-forward: error: forbidden; you need the right to")),
    ):
        PortForward(["port-forward"]).port()


@contextmanager
def _proxy(answer: Callable[[], dict[str, Any]]) -> Iterator[PageProxy]:
    """Open a proxy for a status of the test's own."""

    def ask(path: str) -> PageAnswer:
        assert path.startswith("/page/status")
        return PageAnswer(200, json.dumps(answer()).encode(), "application/json")

    proxy = PageProxy(ask, 0, lambda _link: None)
    thread = threading.Thread(target=proxy.serve)
    thread.start()
    yield proxy
    proxy.close()
    thread.join(LIMIT_S)


def _large_status(num_pods: int) -> dict[str, Any]:
    """Return what a rendezvous says of pods of eight ranks, 32 a rack and 1,024 a zone; one of many has ended."""
    pods = [
        {
            "pod": f"digits-{pod}",
            "uid": f"uid-{pod}",
            "node": f"r{pod // 32}",
            "role": "active",
            "ranks": [*range(8 * pod, 8 * pod + 8)],
            "domains": [f"zone-{pod // 1024}", f"r{pod // 32}"],
            "workers": ["gone" if pod == 2000 else "running"] * 8,
            "is_connected": True,
        }
        for pod in range(num_pods)
    ]
    status = {
        "job": "digits",
        "term": 1,
        "revision": 1,
        "phase": "running",
        "reason": "Training",
        "message": "one",
        "iteration": 0,
        "world_size": 8 * num_pods,
        "spare_ranks": 0,
        "lost_ranks": 0,
        "pods": pods,
        "restarts_by_rung": {},
        "restarts_by_cause": {},
        "recoveries": [],
        "max_step": 3,
        "ettr": 1.0,
        "refused": [],
        "broken_spares": 0,
    }
    moment = "2026-01-01T00:00:00.000Z"
    return {"now": moment, "since": moment, "layers": ["zone", "rack"], "why": [], "status": status}
