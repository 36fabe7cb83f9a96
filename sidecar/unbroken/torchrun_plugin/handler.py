"""torch's RendezvousHandler on rounds of our rendezvous.

The rendezvous decides. `next_rendezvous` reports that this node wants to be in a round, and follows the answers (open
the store, connect to it) until the round runs.
"""

import atexit
import itertools
import logging
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from torch.distributed import PrefixStore  # type: ignore[attr-defined] # torch does not export it by name
from torch.distributed.elastic.events import (  # type: ignore[attr-defined] # torch does not export it by name
    NodeState,
    construct_and_record_rdzv_event,
)
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousSettings, RendezvousTimeout

from unbroken.network.authority import AuthorityFile
from unbroken.rounds.client import RoundsLink, RoundsServer
from unbroken.rounds.starter import Starter, is_local
from unbroken.torchrun_plugin.options import RendezvousOptions, read_options
from unbroken.torchrun_plugin.round_store import RoundStore, connect_store, open_store
from unbroken_core.torchrun_rounds.messages import PROTOCOL, Departure, EndOfRounds, Intent, NodeReport, Stage, Standing

logger = logging.getLogger(__name__)

BACKEND = "unbroken"
_DEPARTURE_S = 1.0
"""How long a process that ends without shutting its handler down tries to report it."""
_RETRY_S = 0.1
_KEEP_ALIVES = 3
"""Heartbeats within the time after which a silent node is lost."""
_numbers = itertools.count()


def create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return the handler of a node. Raises ValueError that names the option."""
    try:
        nodes = (parameters.min_nodes, parameters.max_nodes)
        options = read_options(parameters.endpoint, parameters.run_id, nodes, parameters.config, os.environ)
        return UnbrokenRendezvousHandler(parameters.run_id, options, parameters.local_addr or "")
    except Exception as error:
        construct_and_record_rdzv_event(
            name=f"{BACKEND}.create_handler",
            run_id=parameters.run_id,
            message=f"{type(error).__name__}: {error}",
            node_state=NodeState.FAILED,
            hostname=socket.gethostname(),
            pid=os.getpid(),
        )
        raise


class UnbrokenRendezvousHandler(RendezvousHandler):
    """The handler of one node. For one thread, as torch's agent uses it; the link has a thread of its own."""

    def __init__(self, run_id: str, options: RendezvousOptions, local_address: str = "") -> None:
        """Connects only when it is used."""
        self._run_id = run_id
        self._options = options
        self._local_id = next(_numbers)
        self._host = local_address or socket.gethostname()
        self._settings = _settings(run_id, options)
        self._stores: list[RoundStore] = []
        """The newest last. The one before it serves nodes that have not left its round yet."""
        self._has_begun = False
        self._has_left = False
        self._was_released = False
        report = NodeReport(
            protocol=PROTOCOL,
            uid=uuid.uuid4().hex,
            name=options.name or f"{self._host}_{os.getpid()}_{self._local_id}",
            address=local_address,
            domains=options.domains,
            limits=options.limits,
            intent=Intent.IDLE,
        )
        self._link = RoundsLink(_endpoint(options), run_id, report)
        if options.is_guessable:
            logger.warning(
                "anyone who reaches %s:%d and knows the name of run %s can take part: set UNBROKEN_SECRET to the same "
                "random text on all nodes, or give --rdzv-conf token_file=FILE",
                options.host,
                options.port,
                run_id,
            )

    @property
    def settings(self) -> RendezvousSettings:
        """The settings in torch's form."""
        return self._settings

    @property
    def use_agent_store(self) -> bool:
        """Whether workers use the round's store as well."""
        return os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    def get_backend(self) -> str:
        """Return the name of the backend."""
        return BACKEND

    def get_run_id(self) -> str:
        """Return the name of the run."""
        return self._run_id

    # ------------------------------------------------------------------------------------------------- the next round

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until this node is in a running round.

        Raises RendezvousClosedError, RendezvousTimeoutError, RendezvousConnectionError, RendezvousGracefulExitError.
        """
        self._record(f"node {self._link.report.name} wants to be in the next round of run {self._run_id}")
        try:
            standing, opened = self._join()
            info = self._info(standing, opened)
        except Exception as error:
            self._was_released = isinstance(error, RendezvousGracefulExitError)
            self._record_failure(error)
            raise
        text = f"node {self._link.report.name} is rank {standing.rank} of {standing.size} in round {standing.round}"
        self._record(text, rank=standing.rank)
        logger.info("%s of run %s", text, self._run_id)
        return info

    def _join(self) -> tuple[Standing, RoundStore]:
        if self._has_left:
            raise RendezvousClosedError("this node has left the run: call next_rendezvous before shutdown")
        attempt = self._link.report.attempt + 1
        self._say(intent=Intent.JOIN, attempt=attempt)
        until_s = time.monotonic() + self._options.join_s
        while True:
            standing = self._standing(attempt)
            if self._link.rejected:
                raise RendezvousConnectionError(self._link.rejected)
            if standing is not None:
                _raise_at_end(standing)
                if standing.stage is Stage.RUNNING and standing.round == self._newest_round():
                    self._link.say(intent=Intent.RUN, round=standing.round, rank=standing.rank)
                    return standing, self._stores[-1]
                if standing.stage is Stage.SPARE and not self._link.complaint:
                    # It is not late: there is just no place for it yet.
                    until_s = time.monotonic() + self._options.join_s
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise self._timeout_error(standing)
            may_retry = standing is not None and standing.stage is Stage.STARTING and not self._prepare(standing)
            self._await_change(standing, attempt, min(left_s, _RETRY_S if may_retry else 1.0))

    def _standing(self, attempt: int) -> Standing | None:
        """Return the answer to this request; None before it."""
        standing = self._link.standing
        return standing if standing is not None and standing.attempt == attempt else None

    def _await_change(self, seen: Standing | None, attempt: int, timeout_s: float) -> None:
        self._link.wait(lambda: self._standing(attempt) != seen or bool(self._link.rejected), timeout_s)

    def _newest_round(self) -> int:
        return self._stores[-1].round if self._stores else -1

    def _prepare(self, standing: Standing) -> bool:
        """Open the store of the round that starts, or connect to it; return False to try again soon."""
        if self._newest_round() == standing.round:
            return True
        number, address = standing.round, standing.store_address
        if standing.rank == 0:
            try:
                opened: RoundStore | None = open_store(number, address, self._options.read_s)
            except (OSError, RuntimeError) as error:
                raise RendezvousConnectionError(f"store of round {number} at {address}: {error}") from error
        elif not standing.store_port:
            return True
        else:
            opened = connect_store(number, address, standing.store_port, self._options.read_s)
        if opened is None:
            return False
        self._stores = [*self._stores[-1:], opened]
        self._link.say(ready_round=number, store_port=opened.port if standing.rank == 0 else 0)
        return True

    def _info(self, standing: Standing, opened: RoundStore) -> RendezvousInfo:
        store = PrefixStore(f"torch.rendezvous.{self._run_id}.{standing.round}", opened.store)
        if self.use_agent_store:
            where = RendezvousStoreInfo(opened.address, opened.port)
        else:
            where = RendezvousStoreInfo.build(standing.rank, store, local_addr=opened.address)
        return RendezvousInfo(store, standing.rank, standing.size, where)

    def _timeout_error(self, standing: Standing | None) -> RendezvousError:
        seconds = f"within {self._options.join_s:g} s (join_timeout)"
        if self._link.complaint or standing is None:
            return RendezvousConnectionError(f"want the rendezvous {seconds}: {self._link.complaint}")
        return RendezvousTimeoutError(f"want a round {seconds}: {standing.message or standing.stage}")

    # ------------------------------------------------------------------------------------------------ between rounds

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait for this one in the next round; 0 while it may stay in its own.

        More than 0 as well when a node of its round is lost. While the rendezvous is away its last answer counts.
        """
        standing = self._standing(self._link.report.attempt)
        return 0 if standing is None else standing.num_waiting

    def is_closed(self) -> bool:
        """Return whether there will be no further round. Raises RendezvousConnectionError."""
        self._say()
        self._ask(lambda standing: True, "an answer")
        standing = self._link.standing
        return standing is not None and standing.end is not EndOfRounds.NO

    def set_closed(self) -> None:
        """Close the run: no node gets another round. Raises RendezvousConnectionError, RendezvousTimeoutError."""
        self._say(closes=True)
        self._ask(lambda standing: standing.end is not EndOfRounds.NO, "the run closed")
        self._record(f"node {self._link.report.name} has closed run {self._run_id}", NodeState.SUCCEEDED)

    def _ask(self, is_right: Callable[[Standing], bool], wanted: str) -> None:
        def is_over() -> bool:
            standing = self._link.standing
            return bool(self._link.rejected) or (standing is not None and is_right(standing))

        is_answered = self._link.wait(is_over, self._options.close_s)
        error: RendezvousError | None = None
        if self._link.rejected or (not is_answered and self._link.complaint):
            error = RendezvousConnectionError(self._link.rejected or self._link.complaint)
        elif not is_answered:
            error = RendezvousTimeoutError(f"want {wanted} within {self._options.close_s:g} s (close_timeout)")
        if error is not None:
            self._record_failure(error)
            raise error

    # -------------------------------------------------------------------------------------------------------- the end

    def shutdown(self) -> bool:
        """Leave the run with a reason; the others go on if they are enough. Return whether the rendezvous answered."""
        error = sys.exc_info()[1]
        is_sent = self._shut_down(error)
        if self._was_released and isinstance(error, AttributeError):
            # torch's launcher (2.13) wants the result of a released node, which has none. The node was not needed: that
            # is no failure, and it must not be started again.
            raise SystemExit(0)
        return is_sent

    def _shut_down(self, error: BaseException | None) -> bool:
        departure = Departure.GONE
        if error is None:
            departure = Departure.FINISHED
        elif isinstance(error, ChildFailedError):
            departure = Departure.FAILED
        detail = "" if error is None else f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        if self._leave(departure, detail, self._options.close_s):
            self._record(f"node {self._link.report.name} has left run {self._run_id}", NodeState.SUCCEEDED)
            return True
        text = f"node {self._link.report.name} could not take leave of run {self._run_id}: {self._link.complaint}"
        self._record(text, NodeState.FAILED)
        logger.warning("%s", text)
        return False

    def _leave(self, departure: Departure, detail: str, timeout_s: float) -> bool:
        atexit.unregister(self._leave_at_exit)
        if self._has_left or not self._has_begun:
            return True
        self._has_left = True
        closes = self._link.report.closes or (departure is Departure.FAILED and self._options.is_closed_by_failure)
        self._link.say(intent=Intent.LEAVE, departure=departure, detail=detail, closes=closes)
        is_answered = self._link.wait(self._may_end, timeout_s)
        self._link.stop()
        return is_answered and (self._link.was_connected or bool(self._link.rejected))

    def _may_end(self) -> bool:
        standing = self._link.standing
        is_never = not self._link.was_connected and bool(self._link.complaint)
        return bool(self._link.rejected) or is_never or (standing is not None and standing.stage is Stage.LEFT)

    def _leave_at_exit(self) -> None:
        """Leave at exit: torchrun does not shut its handler down after a signal, and the others need not wait."""
        self._leave(Departure.GONE, "its process ends", _DEPARTURE_S)

    # -------------------------------------------------------------------------------------------------------- internals

    def _say(self, **changes: object) -> None:
        if not self._has_begun:
            self._has_begun = True
            atexit.register(self._leave_at_exit)
        self._link.say(**changes)

    def _record_failure(self, error: Exception) -> None:
        self._record(f"{type(error).__name__}: {error}", NodeState.FAILED)

    def _record(self, message: str, state: NodeState = NodeState.RUNNING, rank: int | None = None) -> None:
        construct_and_record_rdzv_event(
            name=f"{type(self).__name__}",
            run_id=self._run_id,
            message=message,
            node_state=state,
            hostname=self._host,
            pid=os.getpid(),
            local_id=self._local_id,
            rank=rank,
        )


def _raise_at_end(standing: Standing) -> None:
    if standing.stage in (Stage.RUNNING, Stage.STARTING):
        return
    if standing.end is EndOfRounds.CLOSED:
        raise RendezvousClosedError(f"there will be no further round: {standing.message}")
    if standing.end is EndOfRounds.RELEASED:
        raise RendezvousGracefulExitError(f"this node was not needed: {standing.message}")


def _endpoint(options: RendezvousOptions) -> RoundsServer:
    starter = Starter(
        options.host,
        options.port,
        options.token_file,
        options.token,
        options.certificate,
        options.key,
        options.log_file,
    )
    authority = AuthorityFile(Path(options.authority_file)) if options.authority_file else None
    may_start = options.may_start and is_local(options.host)
    start = starter if may_start else None
    return RoundsServer(options.host, options.port, options.token, authority, options.server_name, start)


def _settings(run_id: str, options: RendezvousOptions) -> RendezvousSettings:
    limits = options.limits
    return RendezvousSettings(
        run_id,
        limits.min_nodes,
        limits.max_nodes,
        RendezvousTimeout(
            join=timedelta(seconds=options.join_s),
            last_call=timedelta(seconds=limits.last_call_s),
            close=timedelta(seconds=options.close_s),
            heartbeat=timedelta(seconds=limits.heartbeat_s),
        ),
        keep_alive_interval=timedelta(seconds=limits.heartbeat_s / _KEEP_ALIVES),
        keep_alive_max_attempt=_KEEP_ALIVES,
    )
