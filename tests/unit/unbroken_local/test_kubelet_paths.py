"""Rewriting of mount paths, service names and cluster IPs."""

import pytest

from unbroken_local.kubelet.paths import name_rewriter, path_rewriter

FOLDERS = {"/data": "/tmp/v/d", "/data/deep": "/tmp/v/deep", "/etc/unbroken/": "/tmp/v/s", "/app": "/repo/examples"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("/data", "/tmp/v/d", id="alone"),
        pytest.param("/data/", "/tmp/v/d/", id="with a slash behind"),
        pytest.param("/data/a/b.txt", "/tmp/v/d/a/b.txt", id="as a folder"),
        pytest.param("/data/deep/x", "/tmp/v/deep/x", id="the longer mount wins"),
        pytest.param("/data/deeper", "/tmp/v/d/deeper", id="which ends on a boundary"),
        pytest.param("--dir=/data", "--dir=/tmp/v/d", id="as an option's value"),
        pytest.param("/lib:/data:/app/x", "/lib:/tmp/v/d:/repo/examples/x", id="in a list with colons"),
        pytest.param("file:///data/x", "file:///tmp/v/d/x", id="in a file URL"),
        pytest.param('{"path": "/data"}', '{"path": "/tmp/v/d"}', id="in JSON"),
        pytest.param(
            "cat /data/a > /data/b; ls /app", "cat /tmp/v/d/a > /tmp/v/d/b; ls /repo/examples", id="in a script"
        ),
        pytest.param("/etc/unbroken/token", "/tmp/v/s/token", id="mounted with a slash behind"),
        pytest.param("/data2", "/data2", id="not as a part of a name"),
        pytest.param("/data.txt", "/data.txt", id="not as a file's stem"),
        pytest.param("/data-old/x", "/data-old/x", id="not before a dash"),
        pytest.param("/old/data", "/old/data", id="not behind another folder"),
        pytest.param("data", "data", id="not without its slash"),
        pytest.param("http://host/data", "http://host/data", id="not as the path of a URL with a host"),
    ],
)
def test_a_mount_path_is_replaced_on_path_boundaries_only(text: str, expected: str) -> None:
    assert path_rewriter(FOLDERS)(text) == expected


def test_a_mount_at_the_root_and_no_mounts_at_all_change_nothing() -> None:
    assert path_rewriter({"/": "/tmp/v"})("/data") == "/data"
    assert path_rewriter({})("/data") == "/data"


def test_what_was_replaced_is_not_replaced_again() -> None:
    assert path_rewriter({"/tmp": "/tmp/v/tmp"})("/tmp/x") == "/tmp/v/tmp/x"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("http://web.ns.svc:80/a", "http://[ns/web]:80/a", id="short"),
        pytest.param("web.ns.svc.cluster.local", "[ns/web]", id="long"),
        pytest.param("web.ns.svc.cluster.local.:1", "[ns/web]:1", id="long with the final dot"),
        pytest.param("a.b.svc,c.d.svc", "[b/a],[d/c]", id="several"),
        pytest.param("digits-rendezvous.team-a.svc", "[team-a/digits-rendezvous]", id="with dashes"),
        pytest.param("web.ns.svc.example.com", "web.ns.svc.example.com", id="not under another domain"),
        pytest.param("web.ns.service", "web.ns.service", id="not another word"),
        pytest.param("tcp://10.96.0.7:1", "tcp://127.9.9.9:1", id="a cluster IP"),
        pytest.param(
            "10.96.0.70 110.96.0.7 10.96.0.7.1", "10.96.0.70 110.96.0.7 10.96.0.7.1", id="not a part of another address"
        ),
    ],
)
def test_service_names_and_cluster_ips_become_local_addresses(text: str, expected: str) -> None:
    rewrite = name_rewriter(lambda namespace, name: f"[{namespace}/{name}]", {"10.96.0.7": "127.9.9.9"})
    assert rewrite(text) == expected
