"""Wrapped functions that are called inside the function of another one: they join its iteration."""

from collections.abc import Callable
from typing import Any

from unbroken.inprocess.assignment.policy import refuse_inside
from unbroken.inprocess.interruption import failure
from unbroken.inprocess.loop import entry
from unbroken.inprocess.loop.plugins import Plugins
from unbroken.inprocess.options import WrapperOptions
from unbroken.inprocess.state import FrozenState
from unbroken.inprocess.torch_state.groups import name_apart


class InnerFault(BaseException):
    """Carries an exception of a wrapped function, its cause, past the handlers of the function around it."""


class InnerCalls:
    """The inner functions of one call. Belongs to its main thread."""

    def __init__(self, plugins: Plugins, on_fault: Callable[[BaseException], None]) -> None:
        """`on_fault` is called at once: the code around the function may swallow everything."""
        self._plugins = plugins
        self._on_fault = on_fault
        self._num_begun = 0

    def begin_iteration(self) -> None:
        """Forget those of the last iteration."""
        self._plugins.cut(1)
        self._num_begun = 0

    def run(self, options: WrapperOptions, state: Callable[[], FrozenState], function: Callable[[], Any]) -> Any:
        """Run a function with the plug-ins of these options; return its value, or raise InnerFault.

        A process group that the function around it has made is that of both. After a fault its plug-ins stay for the
        recovery.
        """
        entry.refuse_other_threads()
        refuse_inside(options.rank_assignment)
        self._num_begun += 1
        name_apart(self._num_begun)
        plugins, depth = self._plugins, self._plugins.depth
        plugins.enter(options)
        try:
            plugins.prepare(state())
            value = function()
        except Exception as error:
            self._on_fault(error)
            raise InnerFault(failure.describe(error)) from error
        plugins.complete(state())
        plugins.cut(depth)
        return value
