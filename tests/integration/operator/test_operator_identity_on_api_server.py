"""Secrets of a job on a real API server: who finds which token there, and what a replaced key changes."""

import asyncio
import base64
from pathlib import Path

from tests.waiting import eventually

from unbroken_core.conventions.tokens import Kind, derive_token
from unbroken_operator.adapters.errors import KubeNotFound
from unbroken_operator.api import layout

from .operator_bench import Bench, bench, operator


async def _data(made: Bench, name: str) -> dict[str, str]:
    """Return what a Secret holds, {} while there is none."""
    try:
        item = await made.kube.get(made.path("secrets", name))
    except KubeNotFound:
        return {}
    return {key: base64.b64decode(text).decode() for key, text in item["data"].items()}


async def _replace_key(made: Bench, content: bytes) -> None:
    path = made.path("secrets", "digits-rendezvous")
    await made.kube.merge(path, {"data": {layout.JOB_KEY_KEY: base64.b64encode(content).decode()}})


async def _has_tokens_of(made: Bench, job_key: str, uid: str) -> bool:
    tokens, own = await _data(made, "digits.agents-0-rendezvous"), await _data(made, "digits-rendezvous")
    wanted = {f"digits-{n}": derive_token(job_key, Kind.AGENT, uid, f"digits-{n}") for n in range(64)}
    return tokens == wanted and own["token"] == derive_token(job_key, Kind.READER, uid)


def test_each_pod_finds_its_own_token_and_a_replaced_key_reaches_all(kubeconfig: Path, tmp_path: Path) -> None:
    """Also those whose Secret somebody deleted; a key that can be none changes nothing."""

    async def scenario() -> None:
        async with bench(kubeconfig, tmp_path) as made:
            uid = (await made.apply("digits", replicas=2))["metadata"]["uid"]
            with operator(made):
                await made.wait_for_pods("digits-0", "digits-1")
                first = (await _data(made, "digits-rendezvous"))[layout.JOB_KEY_KEY]
                await eventually(lambda: _has_tokens_of(made, first, uid), "tokens of all pods")
                for pod in await made.pods():
                    (volume,) = (one for one in pod["spec"]["volumes"] if one["name"] == layout.TOKEN_VOLUME)
                    own, authority = (source["secret"] for source in volume["projected"]["sources"])
                    assert (own["name"], [item["key"] for item in own["items"]]) == (
                        "digits.agents-0-rendezvous",
                        [pod["metadata"]["name"]],
                    )
                    assert [item["key"] for item in authority["items"]] == [layout.AUTHORITY_KEY]
            # An operator that starts reads the Secrets: there is no key that can be one.
            await _replace_key(made, b"k" * 40 + b"\nX: y")
            with operator(made):

                async def is_told() -> bool:
                    return "SecretDamaged" in str((await made.condition("digits", "PodsReady")).get("reason"))

                await eventually(is_told, "a condition")
                assert (await _data(made, "digits.agents-0-rendezvous"))["digits-0"] == derive_token(
                    first, Kind.AGENT, uid, "digits-0"
                )
            await _replace_key(made, b"n" * 64)
            with operator(made):
                await eventually(lambda: _has_tokens_of(made, "n" * 64, uid), "tokens of the new key")
            item = await made.kube.get(made.path("secrets", "digits.agents-0-rendezvous"))
            await made.kube.delete(made.path("secrets", "digits.agents-0-rendezvous"), item["metadata"]["uid"])
            with operator(made):
                await eventually(lambda: _has_tokens_of(made, "n" * 64, uid), "the tokens again")

    asyncio.run(scenario())


def test_a_job_that_an_earlier_release_began_goes_on_with_its_old_secret(kubeconfig: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(kubeconfig, tmp_path) as made:
            await made.apply("digits", replicas=2)
            with operator(made):
                await made.wait_for_pods("digits-0", "digits-1")
            # What that release had written.
            old = {"job-key": None, "token": base64.b64encode(b"0" * 64).decode()}
            await made.kube.merge(made.path("secrets", "digits-rendezvous"), {"data": old})
            for name in ("digits-0", "digits-1"):
                await made.end_pod(name, "Failed")
            with operator(made):
                rendezvous = await made.rendezvous("digits")
                await made.wait_for_pods("digits-0", "digits-1", "digits-2", "digits-3")
                pod = await made.kube.get(made.path("pods", "digits-3"))
                (volume,) = (one for one in pod["spec"]["volumes"] if one["name"] == layout.TOKEN_VOLUME)
                assert [item["key"] for item in volume["secret"]["items"]] == ["token", "ca.crt"]
                assert (await _data(made, "digits-rendezvous"))["token"] == "0" * 64
                assert rendezvous.num_refused == 0

    asyncio.run(scenario())
