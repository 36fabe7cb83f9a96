"""Who gets through the proxy of the live page, and who does not."""

import re
from dataclasses import replace

import pytest

from unbroken_cli.page_proxy.server import PageAnswer, PageProxy, Request, Sessions, admit
from unbroken_cli.page_proxy.upstream import secret_value
from unbroken_core.conventions.page_headers import PAGE_HEADERS

PORT = 4321
HERE = Request("/page/", f"127.0.0.1:{PORT}")


@pytest.fixture
def sessions() -> Sessions:
    """Return the sessions of a proxy."""
    return Sessions(PORT)


def cookie_of(sessions: Sessions) -> str:
    """Return what a browser sends back that has come in by the ticket."""
    answer = admit(replace(HERE, path=f"/enter/{sessions.ticket}", site="cross-site"), sessions)
    assert answer is not None
    return answer.cookie.partition(";")[0]


def test_a_ticket_opens_once_and_its_cookie_is_for_this_browser_and_this_page_alone(sessions: Sessions) -> None:
    ticket = sessions.ticket
    first = admit(replace(HERE, path=f"/enter/{ticket}"), sessions)
    assert first is not None
    assert first.status == 200
    assert re.fullmatch(rf"unbroken-page-{PORT}=[\w-]{{43}}; HttpOnly; SameSite=Strict; Path=/", first.cookie, re.ASCII)
    assert ticket not in first.body.decode()
    second = admit(replace(HERE, path=f"/enter/{ticket}"), sessions)
    assert second is not None
    assert (second.status, second.cookie) == (401, "")
    assert sessions.ticket != ticket


def test_who_has_the_cookie_may_read_the_page_and_nothing_else(sessions: Sessions) -> None:
    cookies = f"other=1; {cookie_of(sessions)}"
    for path in ("/page/", "/page/main.js", "/page/status?term=1&after=-1&timeout=5"):
        assert admit(replace(HERE, path=path, cookies=cookies, site="same-origin"), sessions) is None
    assert admit(replace(HERE, path="/", cookies=cookies, site="none"), sessions) == PageAnswer(
        302, b"", location="/page/"
    )
    for path in ("/v1/status", "/v1/agents", "/page/../v1/status", "/page/%2e%2e/v1", "/page/a\r\nb", "//evil/page/"):
        refused = admit(replace(HERE, path=path, cookies=cookies), sessions)
        assert (refused and refused.status) == 404, path


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        pytest.param({"cookies": ""}, 401, id="no cookie"),
        pytest.param({"cookies": f"unbroken-page-{PORT}=guessed"}, 401, id="a wrong cookie"),
        pytest.param({"cookies": f"unbroken-page-{PORT}="}, 401, id="an empty cookie"),
        pytest.param({"cookies": "é" * 5000}, 401, id="no cookie at all"),
        pytest.param({"host": f"evil.example:{PORT}"}, 403, id="a name that was pointed here"),
        pytest.param({"host": "127.0.0.1"}, 403, id="another port"),
        pytest.param({"host": ""}, 403, id="no host"),
        pytest.param({"site": "cross-site"}, 403, id="another site's request"),
        pytest.param({"site": "same-site"}, 403, id="another port's page"),
        pytest.param({"path": "/enter/guessed"}, 401, id="a wrong ticket"),
        pytest.param({"path": "/enter/"}, 401, id="an empty ticket"),
    ],
)
def test_anybody_else_is_refused(sessions: Sessions, changes: dict[str, str], status: int) -> None:
    request = replace(HERE, cookies=cookie_of(sessions))
    assert admit(request, sessions) is None
    refused = admit(replace(request, **changes), sessions)
    assert refused is not None
    assert refused.status == status
    assert refused.cookie == ""


def test_the_oldest_browser_of_many_has_to_come_in_again(sessions: Sessions) -> None:
    cookies = [cookie_of(sessions) for _ in range(17)]
    assert admit(replace(HERE, cookies=cookies[0]), sessions) is not None
    assert all(admit(replace(HERE, cookies=one), sessions) is None for one in cookies[1:])


def test_browser_is_told_to_run_nothing_unsafe_and_to_show_the_page_in_no_frame() -> None:
    policy = PAGE_HEADERS["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy


def test_what_the_jobs_server_sends_is_data_and_never_a_page_or_a_script() -> None:
    """Its image is the tenant's."""
    evil = PageAnswer(200, b"<script>steal()</script>", "text/html", "unbroken-page=1", "http://evil.example/")
    answers = {"/page/status": evil}
    asked: list[str] = []

    def ask(path: str) -> PageAnswer:
        asked.append(path)
        return answers.get(path, evil)

    proxy = PageProxy(ask, 0, lambda _link: None)
    here = Request("/page/", proxy.sessions.hosts[0])
    entry = admit(replace(here, path=f"/enter/{proxy.sessions.ticket}"), proxy.sessions)
    assert entry is not None
    request = replace(here, cookies=entry.cookie.partition(";")[0])
    try:
        for path, kind in (
            ("/page/", "text/html"),
            ("/page/main.js", "text/javascript"),
            ("/page/page.css", "text/css"),
        ):
            own = proxy.answer(replace(request, path=path))
            assert (own.status, own.content_type) == (200, f"{kind}; charset=utf-8")
            assert b"evil" not in own.body
            assert b"steal" not in own.body
        assert proxy.answer(replace(request, path="/page/evil.js")).status == 404
        assert asked == []
        refused = proxy.answer(replace(request, path="/page/status"))
        assert (refused.status, refused.content_type, refused.cookie) == (502, "text/plain; charset=utf-8", "")
        assert b"steal" not in refused.body
        answers["/page/status"] = replace(evil, body=b'{"name": "\\u001b[2J\\u202e"}')
        found = proxy.answer(replace(request, path="/page/status"))
        assert found == PageAnswer(200, b'{"name": "\\\\x1b[2J\\\\u202e"}', "application/json")
        answers["/page/status"] = replace(evil, body=b"[" * 100_000)
        assert proxy.answer(replace(request, path="/page/status")).status == 502
        for status, shown in ((302, 502), (401, 401), (503, 503), (200_000, 502)):
            answers["/page/status"] = replace(evil, status=status)
            refused = proxy.answer(replace(request, path="/page/status"))
            assert refused == PageAnswer(shown, f"the rendezvous answers {status}\n".encode())
    finally:
        proxy._server.server_close()


def test_a_secret_without_an_authority_is_that_of_a_job_that_speaks_in_clear() -> None:
    secret = {"metadata": {"name": "digits-rendezvous"}, "data": {"token": "YWJj"}}
    assert (secret_value(secret, "token"), secret_value(secret, "ca.crt")) == ("abc", None)
