"""All other parsers: of what trainers, keepers, nodes, tenants and processes before say; each step, one of them reads.

Each returns a value, or raises its own error.
"""

import copy
import json
import time
import typing
from collections.abc import Callable
from datetime import datetime, timezone
from itertools import chain
from typing import Any

import torch
from tests.fuzzing.speech import Speaker, spoilt_bytes, spoilt_json
from tests.fuzzing.targets import Target

from unbroken.memory.layout import Shape, make_layout, read_layout
from unbroken.rounds.restored_state import read_known_rounds
from unbroken.standalone import messages as standalone
from unbroken_cli.advice import next_steps
from unbroken_cli.report import html_report
from unbroken_cli.sources.from_rendezvous import job_from_status
from unbroken_cli.text import status_lines
from unbroken_core.conventions.printable import printable, printable_value
from unbroken_core.conventions.tokens import Kind, checked_secret, claim_of, derive_token
from unbroken_core.pod import memory_messages, pod_messages, replica_messages
from unbroken_core.pod.activities import read as read_activity
from unbroken_core.pod.memory_slots import CONTENT_OFFSET, EMPTY, pack_head, read_head
from unbroken_core.protocol import wire
from unbroken_core.protocol.messages import Earlier, JobStatus
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.torchrun_rounds.messages import ToNode
from unbroken_core.vocabulary.errors import InputError, WireError
from unbroken_operator.decisions.quarantine import JobsView, QuarantineLimits, decide_quarantine
from unbroken_operator.decisions.review import answer
from unbroken_operator.decisions.snapshot import node_view

NOW = "2026-01-01T12:00:00Z"
_UNIONS: tuple[Any, ...] = (
    memory_messages.ToKeeper,
    memory_messages.FromKeeper,
    memory_messages.Counted,
    replica_messages.ToHolder,
    replica_messages.ToOwner,
    replica_messages.ToReader,
    replica_messages.AfterContent,
    pod_messages.ToWorker,
    pod_messages.ToLauncher,
    pod_messages.FromLauncher,
    pod_messages.FromWatch,
    standalone.Register,
    standalone.ToRegistered,
    standalone.Challenge,
    standalone.Proof,
    standalone.Attendance,
    standalone.ToHost,
    standalone.StandaloneConfig,
    ToNode,
    Earlier,
)
_FRAMES = (
    "/a/train.py:41 in load_batch",
    "/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py:1 in all_reduce",
    "/lib/python3.11/threading.py:3 in wait",
    "x" * 300,
    "a:1 in ",
    ":??? in f",
)
_JOB: dict[str, Any] = {
    "apiVersion": "unbroken.dev/v1alpha1",
    "kind": "ResilientTrainingJob",
    "metadata": {"name": "digits", "namespace": "ml", "uid": "u", "labels": {"a": "b"}},
    "spec": {
        "replicas": 2,
        "spares": {"count": 1},
        "ranksPerPod": 2,
        "topology": {"layers": [{"name": "rack", "label": "example.com/rack", "minRanks": 2}]},
        "recovery": {"rungs": [{"rung": "process"}], "maxFaultsPerRank": 3},
        "template": {
            "metadata": {"annotations": {"a": "b"}},
            "spec": {
                "containers": [
                    {"name": "trainer", "image": "torch:2", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}
                ],
                "volumes": [{"name": "v", "emptyDir": {}}, {"name": "h", "hostPath": {"path": "/var/lib"}}],
                "securityContext": {"runAsUser": 0},
            },
        },
    },
}


class ParserTarget(Target):
    """Whoever reads something else than the messages to coordinator, agent, rounds and operator."""

    name = "parsers"

    def reset(self) -> None:
        """Write other layouts, heads and tokens."""
        self.layout = make_layout(
            tuple(Shape(f"w{n}", torch.float32, (4, n + 1), (0, 0), (2, n + 1), n if n % 3 else 0) for n in range(8))
        )
        self.head = pack_head(EMPTY) * 2
        key = f"{self.source.getrandbits(256):064x}"
        self.token = derive_token(key, Kind.AGENT, "uid", "digits-0").encode()
        self.settings = json.loads(wire.settings_to_json(JobSettings("digits")))
        self.readers: tuple[Callable[[], Callable[[], object]], ...] = (
            *[self._message] * 8,
            *[self._review] * 4,
            self._quarantine,
            self._layout,
            self._head,
            self._rounds,
            self._settings,
            self._activity,
            self._token,
            *[self._shown] * 3,
        )

    def listen(self) -> None:
        """Let one of them read."""
        read = self.source.choice(self.readers)()
        started_s = time.thread_time()
        try:
            read()
        except InputError as error:
            raise WireError(str(error)) from None
        finally:
            self.took_s += time.thread_time() - started_s

    def _message(self) -> Callable[[], object]:
        expected = self.source.choice(_UNIONS)
        kinds = typing.get_args(expected) or (expected,)
        self.heard = text = Speaker(self.source, {"protocol": (1,), "index": (0, 1)}).say(*kinds)
        return lambda: wire.encode(wire.decode(text.encode(errors="surrogatepass"), expected)).encode("ascii")

    def _json(self, sound: Any) -> str:
        self.heard = json.dumps(spoilt_json(self.source, copy.deepcopy(sound)))
        return self.heard

    def _review(self) -> Callable[[], object]:
        resource = {"resource": "resilienttrainingjobs"}
        request = {"uid": "u", "resource": resource, "operation": "CREATE", "object": _JOB, "namespace": "ml"}
        if self.source.random() < 0.3:
            request |= {"operation": "UPDATE", "oldObject": _JOB}
        text = self._json({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request})

        def read() -> None:
            try:
                made = json.dumps(answer(json.loads(text), ()).to_json())
            except (ValueError, RecursionError) as error:
                # As in the webhook, which sends halves of characters as question marks; InputError is one.
                raise WireError(str(error)[:500].encode(errors="replace").decode()) from None
            if len(made) > 20_000:
                raise AssertionError(f"an answer of {len(made)} characters")

        return read

    def _quarantine(self) -> Callable[[], object]:
        suspects = [{"name": name, "faults": 2, "score": 2.0, "scoreTime": NOW} for name in "abc"]
        text = self._json({"status": {"suspectNodes": suspects}})
        nodes = {name: node_view({"metadata": {"name": name}}) for name in "abcdefgh"}

        def read() -> None:
            status = json.loads(text)
            found = status.get("status") if isinstance(status, dict) else None
            listed = found.get("suspectNodes") if isinstance(found, dict) else None
            # The CRD says that it is a list of objects.
            blamed = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
            sound = JobsView("hpc", "job", [{"name": "a", "faults": 9, "score": 9.0, "scoreTime": NOW}], frozenset("a"))
            hosts = frozenset("abc")
            limits = QuarantineLimits(max_nodes=3)
            decided = decide_quarantine(nodes, [JobsView("ml", "job", blamed, hosts), sound], NOW, limits)
            if len(decided.quarantine) > 2:
                raise AssertionError(f"more than a quarter of the nodes: {decided}")

        return read

    def _layout(self) -> Callable[[], object]:
        text = spoilt_bytes(self.source, self.layout.text)
        if self.source.random() < 0.5:
            text = self._json(json.loads(self.layout.text)).encode()
        self.heard = repr(text)
        return lambda: read_layout(text, self.layout.objects_offset)

    def _head(self) -> Callable[[], object]:
        both = spoilt_bytes(self.source, self.head)
        self.heard = repr(both[:200])
        return lambda: read_head(both, CONTENT_OFFSET + self.source.choice((0, 1, 1 << 40)))

    def _rounds(self) -> Callable[[], object]:
        text = self._json({"run": [3, 2], "other": [0, 1]})
        return lambda: read_known_rounds(text, "where")

    def _settings(self) -> Callable[[], object]:
        text = self._json(self.settings)
        return lambda: wire.settings_from_json(text)

    def _activity(self) -> Callable[[], object]:
        stack = [self.source.choice(_FRAMES) for _ in range(self.source.randrange(6))]
        text = self._json({"type": "MainThread", "iteration": 1, "stack": stack, "call": "wait"})

        def read() -> None:
            thread = wire.decode(text, pod_messages.MainThread)
            for is_blocked in (True, False):
                read_activity(thread, is_blocked)

        return read

    def _token(self) -> Callable[[], object]:
        content = spoilt_bytes(self.source, self.token)
        self.heard = repr(content)
        return lambda: claim_of(checked_secret(content, "token"))

    def _shown(self) -> Callable[[], object]:
        """What commands and the page show of a status that any rendezvous may have sent."""
        self.heard = text = Speaker(self.source, {"protocol": (1,), "job": ("digits",)}).say(JobStatus)

        def read() -> None:
            status: JobStatus = wire.decode(text, JobStatus)
            job = job_from_status(status)
            at = datetime(2026, 1, 1, tzinfo=timezone.utc)
            lines = [printable(line) for line in chain(status_lines(job, at), next_steps(job, at))]
            shown = "".join((*lines, json.dumps(printable_value(json.loads(text)))))
            if "\x1b" in shown + html_report(job, at):
                raise AssertionError("an escape sequence is shown")

        return read
