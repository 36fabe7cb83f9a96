"""torch's LogsSpecs: where workers' output goes, without ever overwriting a file.

<log-dir>/<run>_<random>/attempt_<n>/<local rank>/{stdout.log,stderr.log,error.json}
"""

import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, Std

from unbroken.torchrun_plugin.log_plan import (
    ERR,
    OUT,
    check_folder,
    is_full,
    make_attempt_folder,
    make_run_folder,
    plan_stream,
    read_streams,
    streams_of,
)

logger = logging.getLogger(__name__)

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_Streams = Std | dict[int, Std]


class UnbrokenLogsSpecs(LogsSpecs):
    """The class behind `torchrun --logs-specs=unbroken`."""

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: _Streams = Std.NONE,
        tee: _Streams = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        """Raises NotADirectoryError when `log_dir` is a file, InputError for bad values in the environment."""
        folder = log_dir or tempfile.mkdtemp(prefix="unbroken-logs-")
        if folder != os.devnull:
            check_folder(folder)
        redirects = _from_environment("UNBROKEN_REDIRECTS", redirects)
        super().__init__(folder, redirects, _from_environment("UNBROKEN_TEE", tee), local_ranks_filter)
        self._folder = folder
        self._run_folder = ""

    @property
    def root_log_dir(self) -> str:
        """Folder of all runs."""
        return self._folder

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return where the streams of one attempt's workers go; sets each worker's error file.

        Without room for files all goes to torchrun's own streams, and training goes on. Raises OSError otherwise.
        """
        if not envs:
            logger.warning("logs: want the environments of workers, got none")
        first = envs.get(0, {})
        folder = self._attempt_folder(first, envs)
        destination = LogsDest()
        for local_rank in sorted(envs):
            self._plan(destination, folder, local_rank)
            error_file = str(Path(folder, str(local_rank), "error.json")) if folder else os.devnull
            destination.error_files[local_rank] = error_file
            envs[local_rank][_ERROR_FILE] = "" if error_file == os.devnull else error_file
        destination.filtered_stdout = str(Path(folder, "filtered_stdout.log")) if folder else os.devnull
        destination.filtered_stderr = str(Path(folder, "filtered_stderr.log")) if folder else os.devnull
        return destination

    def _attempt_folder(self, first: Mapping[str, str], envs: Mapping[int, object]) -> str:
        """Return the folder of this attempt, "" without files. Raises OSError."""
        if self._folder == os.devnull:
            return ""
        try:
            if not self._run_folder:
                self._run_folder = make_run_folder(self._folder, first.get("TORCHELASTIC_RUN_ID", "run"))
                logger.info("logs: folder=%s", self._run_folder)
            return make_attempt_folder(self._run_folder, first.get("TORCHELASTIC_RESTART_COUNT", "0"), sorted(envs))
        except OSError as error:
            if not is_full(error):
                raise
            logger.warning("logs: no files, all goes to the console: folder=%s error=%s", self._folder, error.strerror)
            return ""

    def _plan(self, destination: LogsDest, folder: str, local_rank: int) -> None:
        is_shown = not self._local_ranks_filter or local_rank in self._local_ranks_filter
        redirected, teed = streams_of(self._redirects, local_rank), streams_of(self._tee, local_rank)
        for bit, name, targets, tails in (
            (OUT, "stdout.log", destination.stdouts, destination.tee_stdouts),
            (ERR, "stderr.log", destination.stderrs, destination.tee_stderrs),
        ):
            path = str(Path(folder, str(local_rank), name)) if folder else ""
            is_redirected, is_teed = bool(redirected & bit), bool(teed & bit)
            plan = plan_stream(path, is_redirected=is_redirected, is_teed=is_teed, is_shown=is_shown)
            targets[local_rank] = plan.target
            if plan.is_tailed:
                tails[local_rank] = plan.target

    def _key(self) -> tuple[object, ...]:
        return self._folder, self._redirects, self._tee, self._local_ranks_filter

    def __repr__(self) -> str:
        """Return all arguments that it was made with."""
        return (
            f"UnbrokenLogsSpecs(root_log_dir={self._folder}, redirects={self._redirects!r}, tee={self._tee!r}, "
            f"local_ranks_filter={self._local_ranks_filter})"
        )

    def __eq__(self, other: object) -> bool:
        """Equal if all arguments are."""
        return isinstance(other, UnbrokenLogsSpecs) and self._key() == other._key()

    def __hash__(self) -> int:
        """Match equality."""
        return hash(self._folder)


def _from_environment(name: str, given: _Streams) -> _Streams:
    """Return a variable's value in torch's form: torch's command line cannot name ranks above 9."""
    text = os.environ.get(name, "")
    if not text:
        return given
    streams = read_streams(text)
    return Std(streams) if isinstance(streams, int) else {rank: Std(bits) for rank, bits in streams.items()}
