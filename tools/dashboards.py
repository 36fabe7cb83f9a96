"""Write the dashboards of the chart: charts/unbroken/dashboards/*.json, for Grafana 10 and newer.

A panel is a title, a unit and its queries; how panels look is said in dashboard_looks.py.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from tools.dashboard_looks import (
    BAD,
    BLUE,
    FEW,
    GOOD,
    PHASES,
    ROLES,
    RUNGS,
    SAFE,
    SHARE,
    SOURCES,
    SPENT,
    STATES,
    VERDICTS,
    WORKERS,
    Board,
    Panel,
    Query,
    render,
)

from unbroken_core.vocabulary.reasons import Phase

TARGET = Path(__file__).resolve().parent.parent / "charts" / "unbroken" / "dashboards"
FLEET = '{namespace=~"$namespace"}'
JOB = '{namespace=~"$namespace", training_job=~"$training_job"}'
BY_JOB = "by (namespace, training_job)"
OPERATOR = "and on (instance, job) unbroken_operator_reconcile_errors_total"


def one(*query: str) -> tuple[Query, ...]:
    """Return a panel's only query and its legend."""
    return ((query[0], query[1] if len(query) > 1 else ""),)


def job(text: str) -> str:
    """Put the selectors of the job into a query: METRIC{} or METRIC{label="x", }."""
    return text.replace("{}", JOB).replace(", }", ", " + JOB[1:])


def fleet(text: str) -> str:
    """Put the selector of the namespaces into a query."""
    return text.replace("{}", FLEET).replace(", }", ", " + FLEET[1:])


def mean_seconds(select: Callable[[str], str]) -> tuple[Query, ...]:
    """Return the mean seconds of each phase in the time that is shown, in the order of a recovery."""
    ratio = " / ".join(
        f'sum(increase(unbroken_recovery_seconds_{part}{{phase="%s", }}[$__range]))' for part in ("sum", "count")
    )
    return tuple((select(ratio % (phase, phase)), phase.value) for phase in Phase)


def total(select: Callable[[str], str], counter: str) -> tuple[Query, ...]:
    """Return the number of events in the time that is shown; Prometheus makes fractions of them at the edges."""
    return one(select(f"round(sum(increase({counter}{{}}[$__range])))"))


def events(select: Callable[[str], str], counter: str, *labels: str) -> str:
    """Return the events by labels, and nothing where there are none."""
    return select(f"round(sum by ({', '.join(labels)}) (increase({counter}{{}}[$__rate_interval]))) > 0")


def state(select: Callable[[str], str]) -> str:
    """Return the index in PHASES of the state that a job is in."""
    return " + ".join(
        select(f'{number} * max(unbroken_phase{{phase="{word}", }})') for number, (word, _) in enumerate(PHASES)
    )


FLEET_BOARD = Board(
    uid="unbroken-fleet",
    is_of_many=True,
    title="Unbroken / Fleet",
    text="All jobs: how much of their time is progress, what interrupts them, and where.",
    variables=(("namespace", "label_values(unbroken_iteration, namespace)"),),
    rows={
        "Now": (
            Panel("number", "Jobs that run", "short", one('sum(unbroken_operator_jobs{state="Running"})'), width=4),
            Panel(
                "number",
                "Jobs that recover",
                "short",
                one('sum(unbroken_operator_jobs{state="Recovering"})'),
                width=4,
                marks=FEW,
            ),
            Panel(
                "number",
                "Jobs that failed",
                "short",
                one('sum(unbroken_operator_jobs{state="Failed"})'),
                width=4,
                marks=BAD,
            ),
            Panel("number", "Mean ETTR", "percentunit", one(fleet("avg(unbroken_ettr_ratio{})")), width=4, marks=SHARE),
            Panel(
                "number",
                "Recoveries",
                "short",
                total(fleet, "unbroken_restarts_total"),
                width=4,
            ),
            Panel(
                "number",
                "GPU time lost",
                "s",
                one(fleet("sum(increase(unbroken_lost_gpu_seconds_total{}[$__range]))")),
                "Seconds without first-time progress, times active ranks.",
                width=4,
            ),
        ),
        "Progress": (
            Panel(
                "lines",
                "Jobs by state",
                "short",
                one("sum by (state) (unbroken_operator_jobs)", "{{state}}"),
                colors=STATES,
            ),
            Panel(
                "lines",
                "ETTR of the jobs",
                "percentunit",
                tuple(
                    (fleet(f"quantile({quantile}, max {BY_JOB} (unbroken_ettr_ratio{{}}))"), legend)
                    for quantile, legend in ((0.1, "worst tenth"), (0.5, "median"), (0.9, "best tenth"))
                ),
                "Seconds of first-time progress / wall seconds since the job first ran.",
            ),
            Panel(
                "bars",
                "Jobs with the lowest ETTR",
                "percentunit",
                one(fleet(f"bottomk(10, max {BY_JOB} (unbroken_ettr_ratio{{}}))"), "{{namespace}}/{{training_job}}"),
                marks=SHARE,
            ),
        ),
        "Interruptions": (
            Panel(
                "columns",
                "Recoveries by cause",
                "short",
                one(events(fleet, "unbroken_restarts_total", "cause"), "{{cause}}"),
            ),
            Panel(
                "columns",
                "Recoveries by rung",
                "short",
                one(events(fleet, "unbroken_restarts_total", "rung"), "{{rung}}"),
                "The highest rung of the ladder that each recovery needed: in-process is the cheapest.",
                colors=RUNGS,
            ),
            Panel("bars", "Mean seconds of a recovery's phases", "s", mean_seconds(fleet), marks=BLUE),
        ),
        "Where": (
            Panel(
                "table",
                "Worst nodes",
                "short",
                one(fleet('topk(10, sum by (node) (unbroken_recent_culprits{node!="", }))')),
                "Nodes of the culprits of each job's last 20 recoveries.",
                columns=("node",),
            ),
            Panel(
                "table",
                "Worst domains",
                "short",
                one(fleet("topk(10, sum by (domain) (unbroken_recent_culprits{}))")),
                "The same by the innermost layer of the topology, such as the rack.",
                columns=("domain",),
            ),
            Panel(
                "lines",
                "Spare ranks",
                "short",
                (
                    (fleet('sum(unbroken_ranks{role="spare", })'), "ready"),
                    (fleet('sum(unbroken_wanted_ranks{role="spare", })'), "wanted"),
                ),
            ),
        ),
    },
)

JOB_BOARD = Board(
    uid="unbroken-job",
    title="Unbroken / Job",
    text="One job: its interruptions, what each cost, who caused them, and what is left to repair the next.",
    variables=(
        ("namespace", "label_values(unbroken_iteration, namespace)"),
        ("training_job", 'label_values(unbroken_iteration{namespace=~"$namespace"}, training_job)'),
    ),
    # No window: each interruption is one mark, however often Prometheus scrapes.
    annotation=" - ".join(
        job(f"sum by (cause, rung) (unbroken_restarts_total{{}}{before})") for before in ("", " offset 15s")
    )
    + " > 0",
    rows={
        "Now": (
            Panel("number", "Iteration", "locale", one(job("max(unbroken_iteration{})")), width=3),
            Panel(
                "number",
                "Step",
                "locale",
                one(job("max(unbroken_step{})")),
                "-1 where the script reports none.",
                width=3,
            ),
            Panel("number", "ETTR", "percentunit", one(job("max(unbroken_ettr_ratio{})")), width=3, marks=SHARE),
            Panel(
                "number",
                "Goodput",
                "percentunit",
                one(job("sum(increase(unbroken_progress_seconds_total{}[$__range])) / $__range_s")),
                "Share of the time shown that was first-time progress.",
                width=3,
                marks=SHARE,
            ),
            Panel(
                "number",
                "GPU time lost",
                "s",
                one(job("sum(increase(unbroken_lost_gpu_seconds_total{}[$__range]))")),
                width=3,
            ),
            Panel("number", "Recoveries", "short", total(job, "unbroken_restarts_total"), width=3),
            Panel("number", "Ranks lost", "short", one(job('max(unbroken_ranks{role="lost", })')), width=3, marks=BAD),
            Panel(
                "number", "Spare ranks", "short", one(job('max(unbroken_ranks{role="spare", })')), width=3, marks=GOOD
            ),
        ),
        "Training": (
            Panel("state", "State", "short", one(state(job), "state"), width=24, values=PHASES),
            Panel(
                "mean lines",
                "Goodput",
                "percentunit",
                one(
                    job("clamp_max(sum(rate(unbroken_progress_seconds_total{}[$__rate_interval])), 1)"),
                    "first-time progress",
                ),
                width=6,
            ),
            Panel(
                "layers",
                "Where the time went",
                "percentunit",
                one(
                    job("sum by (spent) (unbroken_time_seconds{}) / on () group_left () sum(unbroken_time_seconds{})"),
                    "{{spent}}",
                ),
                "Shares of all time since the job first ran, under earlier rendezvous, too.",
                width=6,
                colors=SPENT,
            ),
            Panel(
                "lines",
                "Step",
                "locale",
                one(job("max(unbroken_step{})"), "step"),
                "It stands still while work is done again, and in each interruption.",
                width=6,
            ),
            Panel(
                "layers",
                "Ranks by role",
                "short",
                one(job("max by (role) (unbroken_ranks{})"), "{{role}}"),
                width=6,
                colors=ROLES,
            ),
        ),
        "Interruptions": (
            Panel(
                "columns",
                "Recovery seconds by phase",
                "s",
                one(
                    job("sum by (phase) (increase(unbroken_recovery_seconds_sum{}[$__rate_interval])) > 0"), "{{phase}}"
                ),
            ),
            Panel("bars", "Mean seconds of a recovery's phases", "s", mean_seconds(job), marks=BLUE),
            Panel(
                "columns",
                "Recoveries",
                "short",
                one(events(job, "unbroken_restarts_total", "cause", "rung"), "{{cause}}, by {{rung}}"),
            ),
            Panel(
                "table",
                "Culprits of the last 20 recoveries",
                "short",
                one(job("sum by (node, domain, cause) (unbroken_recent_culprits{})")),
                width=16,
                columns=("node", "domain", "cause"),
            ),
            Panel(
                "bars",
                "Spare ranks by domain",
                "short",
                one(job("max by (domain) (unbroken_spares{})"), "{{domain}}"),
                marks=GOOD,
            ),
        ),
        "Checkpoints in memory": (
            Panel(
                "lines",
                "Steps behind the training",
                "locale",
                (
                    (job("clamp_min(max(unbroken_step{}) - max(unbroken_memory_complete_step{}), 0)"), "on all ranks"),
                    (job("clamp_min(max(unbroken_step{}) - max(unbroken_memory_protected_step{}), 0)"), "protected"),
                    (job("max(unbroken_disk_behind_steps{})"), "on the disk"),
                ),
                "What is done again after a fault: of a process, of a whole pod, of all pods.",
                width=6,
                colors=SAFE,
            ),
            Panel(
                "lines",
                "Seconds of a save",
                "s",
                (
                    (
                        job(
                            "sum(rate(unbroken_memory_save_seconds_sum{}[$__rate_interval])) / "
                            "sum(rate(unbroken_memory_save_seconds_count{}[$__rate_interval]))"
                        ),
                        "mean",
                    ),
                    (
                        job(
                            "histogram_quantile(0.99, "
                            "sum by (le) (rate(unbroken_memory_save_seconds_bucket{}[$__rate_interval])))"
                        ),
                        "99 of 100 are faster",
                    ),
                ),
                "For so long a save holds up its worker.",
                width=6,
            ),
            Panel(
                "lines",
                "Saves that were due and not made",
                "short",
                one(job("sum by (reason) (increase(unbroken_memory_skipped_total{}[$__rate_interval]))"), "{{reason}}"),
                width=6,
            ),
            Panel(
                "columns",
                "Restores of workers",
                "short",
                one(events(job, "unbroken_memory_restore_seconds_count", "source"), "from {{source}}"),
                width=6,
                colors=SOURCES,
            ),
            Panel(
                "lines",
                "Mean seconds of a restore",
                "s",
                one(
                    job(
                        "sum by (source) (unbroken_memory_restore_seconds_sum{}) / "
                        "(sum by (source) (unbroken_memory_restore_seconds_count{}) > 0)"
                    ),
                    "from {{source}}",
                ),
                "Of all restores so far.",
                width=6,
                colors=SOURCES,
            ),
            Panel(
                "lines",
                "Memory used, fullest pod",
                "percentunit",
                one(job("max(unbroken_memory_used_bytes{} / unbroken_memory_limit_bytes{})"), "of the limit"),
                width=6,
            ),
            Panel(
                "lines",
                "Checkpoints between pods",
                "Bps",
                one(
                    job("sum by (direction) (rate(unbroken_memory_peer_bytes_total{}[$__rate_interval]))"),
                    "{{direction}}",
                ),
                width=6,
            ),
            Panel(
                "lines",
                "Spoilt or not written",
                "short",
                (
                    (job("sum(increase(unbroken_memory_digest_failures_total{}[$__rate_interval]))"), "wrong digest"),
                    (
                        job("sum(increase(unbroken_memory_disk_failures_total{}[$__rate_interval]))"),
                        "part not on the disk",
                    ),
                ),
                width=6,
            ),
        ),
        "Health": (
            Panel(
                "lines",
                "Slow ranks",
                "short",
                one(job("max(unbroken_stragglers{})"), "hold all others up"),
                "Busy for longer in each step than the rest of their pipeline stage, in two windows in a row.",
                colors={"hold all others up": "red"},
            ),
            Panel(
                "lines",
                "Ranks whose busy time is compared",
                "short",
                (
                    (job("max(unbroken_compared_ranks{})"), "compared"),
                    (job('max(unbroken_ranks{role="active", })'), "active"),
                ),
                "Of the others nobody knows whether they are slow.",
            ),
            Panel(
                "lines",
                "Findings of watches",
                "short",
                one(job("max by (verdict) (unbroken_health_findings{})"), "{{verdict}}"),
                "Devices, links and storage; a slow rank counts as degraded, or as suspect where it may move.",
                colors=VERDICTS,
            ),
            Panel(
                "lines",
                "Log rules that spoke",
                "short",
                one(job("sum by (rule) (increase(unbroken_log_rule_spoken_total{}[$__rate_interval]))"), "{{rule}}"),
                "A line matched, or one that was expected did not come.",
                width=12,
            ),
            Panel(
                "lines",
                "Output that no log rule saw",
                "Bps",
                one(job("sum by (pod) (rate(unbroken_log_rules_skipped_bytes_total{}[$__rate_interval]))"), "{{pod}}"),
                "It was too much. Lines that are expected count as seen meanwhile.",
                width=12,
            ),
        ),
        "Pods": (
            Panel(
                "layers",
                "Workers by phase",
                "short",
                one(job("sum by (phase) (unbroken_agent_workers{})"), "{{phase}}"),
                colors=WORKERS,
            ),
            Panel(
                "states",
                "Health checks",
                "short",
                one(job("min by (check) (unbroken_health_check{})"), "{{check}}"),
                "Of the script: fails where its last run failed on a worker of any pod.",
                values=(("fails", "red"), ("passes", "green")),
            ),
            Panel(
                "lines",
                "Agents",
                "short",
                (
                    (job("count(unbroken_agent_connected{})"), "run"),
                    (job("sum(unbroken_agent_connected{})"), "connected"),
                ),
            ),
            Panel(
                "lines",
                "Oldest heartbeat",
                "s",
                (
                    (job("max(unbroken_heartbeat_age_seconds{})"), "age"),
                    (job("max(unbroken_heartbeat_timeout_seconds{})"), "lost at"),
                ),
            ),
            Panel(
                "lines",
                "Refused",
                "short",
                one(job("sum by (reason) (increase(unbroken_refused_total{}[$__rate_interval]))"), "{{reason}}"),
            ),
            Panel(
                "lines",
                "Term of the rendezvous",
                "short",
                one(job("max(unbroken_term{})"), "term"),
            ),
        ),
    },
)

OPERATOR_BOARD = Board(
    uid="unbroken-operator",
    title="Unbroken / Operator",
    text="The operator itself: what it does, how long it takes, and what the API server says.",
    variables=(),
    rows={
        "Work": (
            Panel(
                "lines",
                "Jobs by state",
                "short",
                one("sum by (state) (unbroken_operator_jobs)", "{{state}}"),
                colors=STATES,
            ),
            Panel(
                "lines",
                "Actions",
                "ops",
                one("sum by (action) (rate(unbroken_operator_actions_total[$__rate_interval]))", "{{action}}"),
            ),
            Panel(
                "mean lines",
                "Plans that could not be carried out",
                "short",
                one("round(sum(increase(unbroken_operator_reconcile_errors_total[$__rate_interval])))", "failed"),
            ),
        ),
        "Speed": (
            Panel(
                "mean lines",
                "Seconds of a plan",
                "s",
                tuple(
                    (
                        f"histogram_quantile({quantile}, sum by (le) "
                        "(rate(unbroken_operator_reconcile_seconds_bucket[$__rate_interval])))",
                        legend,
                    )
                    for quantile, legend in ((0.5, "median"), (0.99, "99 %"))
                ),
                width=6,
            ),
            Panel(
                "many lines",
                "Calls to the API server",
                "reqps",
                one(
                    "sum by (verb, resource) (rate(unbroken_operator_api_calls_total[$__rate_interval]))",
                    "{{verb}} {{resource}}",
                ),
                width=12,
            ),
            Panel(
                "lines",
                "Answers of the API server",
                "reqps",
                one("sum by (outcome) (rate(unbroken_operator_api_calls_total[$__rate_interval]))", "{{outcome}}"),
                "HTTP status, or error where there was no answer.",
                width=6,
            ),
        ),
        "Process": (
            Panel(
                "lines", "Memory", "bytes", one(f"process_resident_memory_bytes {OPERATOR}", "{{instance}}"), width=12
            ),
            Panel(
                "lines",
                "CPU cores",
                "none",
                one(f"rate(process_cpu_seconds_total[$__rate_interval]) {OPERATOR}", "{{instance}}"),
                width=12,
            ),
        ),
    },
)

BOARDS = {"fleet": FLEET_BOARD, "job": JOB_BOARD, "operator": OPERATOR_BOARD}


def main() -> int:
    """Write the dashboards; return the exit code."""
    TARGET.mkdir(exist_ok=True)
    for name, board in BOARDS.items():
        (TARGET / f"{name}.json").write_text(render(board), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
