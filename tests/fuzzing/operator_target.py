"""The operator as a listener: it reads what a rendezvous reports, and the status that it wrote itself before."""

import time
from dataclasses import replace
from typing import Any

from tests.fuzzing.speech import Speaker
from tests.fuzzing.targets import Target
from tests.unit.unbroken_operator.operator_world import World, running_world

from unbroken_core.protocol import wire
from unbroken_core.protocol.messages import PROTOCOL, JobStatus
from unbroken_core.vocabulary.reasons import Cause, JobPhase
from unbroken_operator.decisions.limits.report import read_report, report_limits


class OperatorTarget(Target):
    """One job's planner."""

    name = "operator"

    world: World

    def reset(self) -> None:
        """Begin another job."""
        self.world = running_world()
        assert self.world.report is not None
        self.sound: JobStatus = self.world.report
        self.revision = 10

    def listen(self) -> None:
        """Take a report, plan, and write the status; now and then some of the status is lost."""
        source, world = self.source, self.world
        if source.random() < 0.002:
            self.reset()
        self.revision += 1
        names = tuple(world.names())
        uids = tuple(world.uid_of(name) for name in names)
        usual: dict[str, tuple[Any, ...]] = {
            "protocol": (PROTOCOL,),
            "job": ("digits",),
            "term": (1, 1, 2),
            "revision": (self.revision,),
            "phase": tuple(phase.value for phase in JobPhase if phase is not JobPhase.COMPLETE),
            "pod": names or ("digits-0",),
            "uid": uids or ("u",),
            "cause": tuple(cause.value for cause in Cause),
            "number": (1, 2, 3),
            "ended_at": ("", "2026-01-01T00:00:01.000Z"),
            "started_at": ("2026-01-01T00:00:00.000Z",),
        }
        speaker = Speaker(source, usual)
        if source.random() < 0.5:
            text = speaker.say(JobStatus)
        else:
            text = speaker.repeat(replace(self.sound, revision=self.revision))
        self.heard = text
        limits = report_limits(world.job["spec"], len(names))
        started_s = time.thread_time()
        try:
            world.report = read_report(text.encode(errors="surrogatepass"), limits)
        finally:
            self.took_s += time.thread_time() - started_s
        if source.random() < 0.1 and world.job.get("status"):
            world.job["status"].pop(source.choice(sorted(world.job["status"])))
        started_s = time.thread_time()
        actions = world.actions()
        self.took_s += time.thread_time() - started_s
        wire.encode(world.report)
        for action in actions:
            world.apply(action)
