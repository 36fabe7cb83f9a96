"""Messages as text: what was sent arrives, anything else is refused."""

import json
import typing
from typing import Union

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.message_values import values_of

from unbroken_core.pod import pod_messages
from unbroken_core.protocol import messages
from unbroken_core.protocol.messages import Fault, Heartbeat, Hello, Observation, Policy, Report, WorkerState
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.protocol.wire import MAX_MESSAGE_BYTES, decode, encode, settings_from_json, settings_to_json
from unbroken_core.vocabulary.checkpoints import Candidate, Held, Holding, Restore
from unbroken_core.vocabulary.errors import WireError
from unbroken_core.vocabulary.layers import Layer
from unbroken_core.vocabulary.reasons import Cause, Role, WorkerPhase

KINDS: list[type] = [
    kind
    for union in (
        messages.AgentMessage,
        messages.RendezvousMessage,
        pod_messages.FromWorker,
        pod_messages.FromLauncher,
        pod_messages.FromWatch,
        pod_messages.ToWorker,
        pod_messages.ToLauncher,
    )
    for kind in typing.get_args(union)
] + [messages.Observation, messages.JobStatus]


@pytest.mark.parametrize("kind", dict.fromkeys(KINDS), ids=lambda kind: kind.__name__)
@settings(max_examples=25)
@given(data=st.data())
def test_every_message_arrives_as_it_was_sent(kind: type, data: st.DataObject) -> None:
    message = data.draw(values_of(kind))
    text = encode(message)
    assert "\n" not in text
    assert decode(text, kind) == message
    assert decode(text.encode(), Union[kind, Heartbeat]) == message


def test_a_job_without_copies_says_not_a_byte_of_them() -> None:
    told = [
        encode(messages.Welcome(1, 1, 5.0)),
        encode(messages.Report(1, (), memory=Held("aa", (Holding("a", 1, 0, 1, 1, ((0, "aa", "aa"),)),)))),
        encode(messages.Plan(1, 0, Role.ACTIVE, 1, "h", 1, (), restore=Restore((Candidate(1, 0, 1, 1),)))),
        settings_to_json(JobSettings("digits")),
    ]
    for text in told:
        for name in ("copies", '"host', '"port', "problems", "fetches", "peers", "across"):
            assert name not in text


def test_copies_that_are_asked_for_arrive() -> None:
    settings = JobSettings("digits", copies=2, across="host")
    assert settings_from_json(settings_to_json(settings)) == settings
    welcome = messages.Welcome(1, 1, 5.0, copies=2)
    assert decode(encode(welcome), messages.Welcome) == welcome


def test_what_is_usual_of_a_worker_is_left_out_and_read_all_the_same() -> None:
    states = (
        WorkerState(0, 0, WorkerPhase.STARTING),
        WorkerState(1, 2, WorkerPhase.READY, iteration=0, host="10.0.0.1", port=0, step=0, has_progress=True),
    )
    text = encode(Report(1, states))
    assert json.loads(text)["workers"] == [
        {"local_rank": 0, "incarnation": 0, "phase": "starting"},
        {
            "local_rank": 1,
            "incarnation": 2,
            "phase": "ready",
            "iteration": 0,
            "host": "10.0.0.1",
            "step": 0,
            "has_progress": True,
        },
    ]
    assert decode(text, Report) == Report(1, states)


def test_fields_of_a_newer_release_are_passed_over_at_every_depth() -> None:
    fault = {"cause": "exception", "iteration": 3, "colour": ["red"]}
    worker = {"local_rank": 0, "incarnation": 0, "phase": "running", "fault": fault, "weight": {"kg": 1}}
    text = json.dumps({"type": "Report", "seq": 1, "more": None, "workers": [worker] * 2})
    state = WorkerState(0, 0, WorkerPhase.RUNNING, fault=Fault(Cause.EXCEPTION, 3))
    assert decode(text, Report) == Report(1, (state, state))
    wrong = json.dumps({"type": "Report", "seq": 1, "more": None, "workers": [worker, {**worker, "phase": 7}]})
    with pytest.raises(WireError, match=r"^Report\.workers\[1\]\.phase: want one of"):
        decode(wrong, Report)


HEARTBEAT = {"type": "Heartbeat", "seq": 1, "max_step": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "message: want JSON, got 'nonsense'"),
        ("[1]", "message: want a JSON object, got '[1]'"),
        ("{}", "type: want one of ['Heartbeat', 'Report'], got None"),
        ('{"type":"Plan"}', "type: want one of ['Heartbeat', 'Report'], got 'Plan'"),
        (json.dumps({**HEARTBEAT, "seq": "1"}), "Heartbeat.seq: want a JSON int, got '1'"),
        (json.dumps({**HEARTBEAT, "seq": True}), "Heartbeat.seq: want a JSON int, got True"),
        (json.dumps({**HEARTBEAT, "seq": 1.0}), "Heartbeat.seq: want a JSON int, got 1.0"),
        ('{"type":"Heartbeat"}', "Heartbeat: missing 1 required positional argument: 'seq'"),
        ('{"type":"Report","seq":1,"workers":{}}', "Report.workers: want a list, got {}"),
        (
            '{"type":"Report","seq":1,"workers":[{"local_rank":0,"incarnation":0,"phase":"lost"}]}',
            "Report.workers[0].phase: want one of",
        ),
        ("[" * 100_000, "message: want JSON, got"),
        ("\udcff", "message: want JSON, got"),
    ],
)
def test_what_is_not_a_message_is_refused(text: str, message: str) -> None:
    with pytest.raises(WireError) as caught:
        decode(text, Union[Heartbeat, Report])
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < 400


def test_layers_of_a_script_are_sent_without_names() -> None:
    policy = Policy(layers=(Layer(min_ranks=2, max_ranks=4, replace_from=False),))
    text = encode(Report(1, (WorkerState(0, 0, WorkerPhase.READY, policy=policy),)))
    (layer,) = json.loads(text)["workers"][0]["policy"]["layers"]
    assert layer == {"min_ranks": 2, "max_ranks": 4, "replace_from": False, "close_gaps": False}


def test_bytes_that_are_not_text_are_refused() -> None:
    with pytest.raises(WireError, match="want JSON"):
        decode(b"\xff\xfe\x00", Hello)


def test_a_message_that_is_too_long_is_not_even_parsed() -> None:
    with pytest.raises(WireError, match=f"want at most {MAX_MESSAGE_BYTES} bytes, got {MAX_MESSAGE_BYTES + 1}"):
        decode("[" * (MAX_MESSAGE_BYTES + 1), Hello)


def test_numbers_that_are_not_finite_are_refused() -> None:
    text = '{"type":"Welcome","protocol":1,"term":1,"heartbeat_interval_s":NaN}'
    with pytest.raises(WireError, match="want a finite number, got nan"):
        decode(text, messages.Welcome)


def test_whole_number_that_no_float_can_hold_is_refused() -> None:
    text = '{"type":"Welcome","protocol":1,"term":1,"heartbeat_interval_s":1' + "0" * 400 + "}"
    with pytest.raises(WireError, match=r"Welcome.heartbeat_interval_s: want a finite number, got 10000"):
        decode(text, messages.Welcome)


def test_an_observation_of_all_pods_of_the_largest_plan_fits() -> None:
    pod = messages.PodObservation(
        "a-training-job-16383", "node-16383.cluster.internal", ("block-1", "rack-12", "nvl-3")
    )
    assert len(encode(Observation({f"{number:036d}": pod for number in range(16_384)}))) < MAX_MESSAGE_BYTES
