"""The plug-ins of the wrapped functions that run now: those of the call, then of wrapped functions inside it."""

import logging
from dataclasses import replace

from unbroken.inprocess.abort import Abort
from unbroken.inprocess.assignment.policy import violation
from unbroken.inprocess.exception import RestartAbort
from unbroken.inprocess.interruption.slow_plugin import AT_END, PATIENCE_S, named_when_slow
from unbroken.inprocess.loop.health_record import HealthRecord
from unbroken.inprocess.options import WrapperOptions
from unbroken.inprocess.state import FrozenState

logger = logging.getLogger(__name__)


class Plugins:
    """Innermost first, wherever something ends."""

    def __init__(self, options: WrapperOptions) -> None:
        self.health = HealthRecord()
        """The last results of all health checks."""
        self._layers = [self._watched(options)]
        # A worker that does not leave is ended after the difference: it is named sooner.
        leave_s = (options.hard_timeout - options.soft_timeout).total_seconds()
        self.patience_s = min(PATIENCE_S, leave_s / 2)
        """A plug-in that runs longer is named."""

    @property
    def depth(self) -> int:
        """Number of wrapped functions that run, one inside the other."""
        return len(self._layers)

    def enter(self, options: WrapperOptions) -> None:
        """A wrapped function begins inside the others."""
        self._layers.append(self._watched(options))

    def cut(self, depth: int) -> None:
        """Forget all but the outermost so many."""
        del self._layers[depth:]

    def aborts(self) -> list[Abort]:
        """Return the plug-ins that end communicators, each once; from any thread."""
        aborts = [layer.abort for layer in self._inside_out() if layer.abort is not None]
        return list({id(abort): abort for abort in aborts}.values())

    def prepare(self, state: FrozenState) -> None:
        """Run the plug-ins before the innermost function; raises what they raise.

        Raises RestartAbort when the plan is not what the wrapper's rank assignment or filter asks for.
        """
        layer = self._layers[-1]
        size = state.active_world_size or 0
        for name, policy in (("rank_assignment", layer.rank_assignment), ("rank_filter", layer.rank_filter)):
            if text := violation(policy, size):
                raise RestartAbort(f"{name}: {text} in the job's spec")
        for plugin in (layer.initialize, layer.health_check):
            if plugin is not None:
                plugin(state)

    def finalize(self, state: FrozenState) -> None:
        """Clean up after functions that were left; raises what a plug-in raises."""
        for layer in self._inside_out():
            if layer.finalize is not None:
                with named_when_slow("finalize", state.iteration, self.patience_s):
                    layer.finalize(state)

    def check_health(self, state: FrozenState) -> None:
        """Raises what a health check raises."""
        for layer in self._inside_out():
            check = layer.restart_health_check or layer.health_check
            if check is not None:
                with named_when_slow("health_check", state.iteration, self.patience_s):
                    check(state)

    def complete(self, state: FrozenState) -> None:
        """Run the plug-ins after the innermost function has returned; their errors are logged."""
        completion = self._layers[-1].completion
        if completion is None:
            return
        try:
            with named_when_slow("completion", state.iteration, self.patience_s, AT_END):
                completion(state)
        except Exception as error:
            logger.error("completion raised: iteration=%d", state.iteration, exc_info=error)

    def terminate(self, state: FrozenState, reason: BaseException) -> None:
        """Run the plug-ins when this worker leaves for good; their error is raised from the reason."""
        try:
            for layer in self._inside_out():
                if layer.terminate is not None:
                    with named_when_slow("terminate", state.iteration, self.patience_s, AT_END):
                        layer.terminate(state)
        except Exception as error:
            raise error from reason

    def _watched(self, options: WrapperOptions) -> WrapperOptions:
        check, at_restart = options.health_check, options.restart_health_check
        return replace(
            options,
            health_check=None if check is None else self.health.watch(check),
            restart_health_check=None if at_restart is None else self.health.watch(at_restart),
        )

    def _inside_out(self) -> list[WrapperOptions]:
        return self._layers[::-1]
