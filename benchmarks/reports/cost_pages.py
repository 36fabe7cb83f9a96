"""Pure but for `write_pages`: the tables of README.md, docs/cost.md and docs/benchmarks.md, from docs/cost/cost.json.

Each stands between two comments of its name; what is between them is written anew.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reports.cost_picture import measured_picture, sized_picture
from reports.lost_time_terms import PHASES, TERMS
from unbroken_cli.sizing.formulas import daly_ettr
from unbroken_core.vocabulary.errors import InputError

Json = Mapping[str, Any]
NAMES = {
    "unbroken-memory": "Unbroken, checkpoints in memory",
    "unbroken-disk": "Unbroken, disk only",
    "unbroken-process": "Unbroken, a plain script",
    "torchrun": "torchrun",
    "nvrx": "NVRx, in-process",
    "ft_launcher": "NVRx, `ft_launcher`",
    "recreate": "recreate all pods, as JobSet",
}
KIND_NAMES = {"exception": "exception", "sigkill": "SIGKILL", "pod-lost": "pod lost", "hang": "hang"}
PARTS = {
    "README.md": ("cost",),
    "docs/cost.md": (
        *("cost-run", "cost-measured", "cost-sized", "cost-background", "cost-verdict", "cost-example"),
        "cost-assumptions",
    ),
    "docs/benchmarks.md": ("cost-phases",),
}
SHOWN = ("exception", "pod-lost")
"""Faults of the README's table."""
PICTURES = {"docs/cost/measured.svg": measured_picture, "docs/cost/sized.svg": sized_picture}
NOTHING = "*Not measured yet: `make cost` writes it.*"
EXAMPLE_GPUS = 16384
WIDTH = 100
BUSY = 6.0
"""Load average above which others must have been there."""
BUSY_WORDS = "**Others used the machine meanwhile: the seconds are longer than on a quiet one, and vary more.**"


def write_pages(data: Json, root: Path) -> None:
    """Write all parts and pictures into a checkout."""
    for name, draw in PICTURES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(draw(data), encoding="utf-8")
    for name, parts in PARTS.items():
        page = root / name
        page.write_text(with_parts(page.read_text(encoding="utf-8"), data, parts, name), encoding="utf-8")


def with_parts(text: str, data: Json | None, parts: Sequence[str], where: str) -> str:
    """Return a page with its parts written anew; data None: nothing is measured. Raises InputError without a place."""
    for part in parts:
        first, last = f"<!-- {part} -->\n", f"<!-- /{part} -->"
        before, found, rest = text.partition(first)
        _old, ended, after = rest.partition(last)
        if not found or not ended or first in after:
            raise InputError(f"{where}: want one {first.strip()} with {last} after it")
        body = NOTHING if data is None else _MAKERS[part](data)
        text = f"{before}{first}\n{body}\n\n{last}{after}"
    return text


def run_words(data: Json) -> str:
    """Say how the laptop's figures came to be."""
    measured = data["measured"]
    simulated = f"Simulated {data['runs']} times {data['duration_s'] / 86400:g} days."
    if "faults" not in measured:
        return wrapped(f"All figures: [cost/cost.json](cost/cost.json). The rows came from a file. {simulated}")
    medians = f"medians of {measured['faults']} faults each" if measured["faults"] > 1 else "one fault each"
    size = " A small model: these are no figures." if measured["quick"] else ""
    loads = measured["load_before"], measured["load_after"]
    busy = f" {BUSY_WORDS}" if max(loads) > BUSY else ""
    return wrapped(
        f"All figures: [cost/cost.json](cost/cost.json). "
        f"Measured on {measured['cpus']} cores in {measured['minutes']:g} minutes, {medians}; the load average was "
        f"{loads[0]:g} before and {loads[1]:g} after, of which the benchmark itself makes 2 to 4.{busy}{size} "
        f"{simulated}"
    )


def measured_table(data: Json) -> str:
    """Return what each fault has cost, by the terms of the identity."""
    head = ("fault", "system", "lost s", "steps redone", *TERMS)
    lines = []
    for row in data["rows"]:
        names = [KIND_NAMES[row["fault"]], NAMES[row["system"]]]
        if not row["faults"]:
            lines.append([*names, "-", "-", *("-" for _ in TERMS)])
            continue
        seconds = [f"{row['terms'][term]:.2f}" for term in TERMS]
        lines.append([*names, f"{row['lost_s']:.2f}", f"{row['steps_redone']:g}", *seconds])
    reasons = [
        f"- {NAMES[row['system']]}, {KIND_NAMES[row['fault']]}: {row['reason']}."
        for row in data["rows"]
        if row["reason"]
    ]
    silent = sorted(
        {
            NAMES[row["system"]]
            for row in data["rows"]
            if row["faults"] and not all(fault["is_known"] for fault in row["faults"])
        }
    )
    if silent:
        reasons.append(f"- Did not say when it knew of a fault, so `detect` is in `restart`: {', '.join(silent)}.")
    reasons += [f"- {line}" for line in slower(data["rows"], tuple(KIND_NAMES))]
    notes = "\n".join(wrapped(reason, "  ") for reason in reasons)
    picture = "![Bars of each system and fault: seconds until the next new step, by term](cost/measured.svg)"
    return f"{picture}\n\n{table(head, lines, 2)}" + (f"\n\n{notes}" if notes else "")


def phases_table(data: Json) -> str:
    """Return the same faults by how far the workers were."""
    phases = (*PHASES.values(), "redo")
    lines = [
        [KIND_NAMES[row["fault"]], NAMES[row["system"]], f"{row['lost_s']:.2f}"]
        + [f"{row['phases'][phase]:.2f}" for phase in phases]
        + ["-" if row["step_s"] is None else f"{row['step_s']:.2f}"]
        for row in data["rows"]
        if row["faults"]
    ]
    return table(("fault", "system", "lost s", *phases[:-1], "redo, and the new step", "step s"), lines, 2)


def sized_table(data: Json, in_background: bool = False) -> str:
    """Return `ettr` and lost GPU-hours by rates, size and system."""
    lines = []
    for one in _sized(data, in_background):
        lost = [f"{one['shares'][term]:.2%}" for term in TERMS[1:]]
        lines.append(
            [
                one["rates"],
                f"{one['gpus']:,}",
                NAMES[one["system"]],
                f"{one['ettr']:.4f} ± {one['margin']:.4f}",
                f"{one['lost_gpu_hours']:,}",
                *lost,
                duration(one["every_s"]),
            ]
        )
    found = table(("rates of", "GPUs", "system", "ettr", "lost GPU-hours", *TERMS[1:], "saves every"), lines, 3)
    picture = "![Bars of each system: the share of the time that did not train, by term](cost/sized.svg)"
    return found if in_background else f"{picture}\n\n{found}"


def short_table(data: Json) -> str:
    """Return the README's table: one column for each size, with the first rates."""
    rates = next(iter(data["rates"]))
    sized = [one for one in _sized(data, False) if one["rates"] == rates]
    sizes = sorted({one["gpus"] for one in sized})
    lines = []
    for system, name in NAMES.items():
        row = [name]
        for kind in SHOWN:
            found = next(one for one in data["rows"] if (one["system"], one["fault"]) == (system, kind))
            row.append(f"{found['lost_s']:.1f} s" if found["faults"] else "-")
        by_size = {one["gpus"]: one for one in sized if one["system"] == system}
        row += [
            f"{by_size[size]['ettr']:.3f}, {by_size[size]['lost_gpu_hours']:,} h" if by_size else "-" for size in sizes
        ]
        lines.append(row)
    head = ("system", "exception", "pod lost", *(f"{size:,} GPUs" for size in sizes))
    words = wrapped(
        f"The seconds are measured on two cores, from the last step before the fault to the next new one. The rest is "
        f"computed from them, with assumptions, for {data['duration_s'] / 86400:g} days with the faults of {rates}: "
        "`ettr`, the share of the time that trained, and the GPU-hours that did not."
    )
    busy = max(data["measured"].get(name, 0.0) for name in ("load_before", "load_after")) > BUSY
    words = f"{words}\n{BUSY_WORDS}" if busy else words
    worse = [wrapped(f"- {line}", "  ") for line in (*slower(data["rows"], SHOWN), *not_better(sized))]
    told = (
        "\n".join(["Where ours is not better:", "", *worse])
        if worse
        else "Ours is better than each of the others here."
    )
    return f"{table(head, lines, 1)}\n\n{words}\n\n{told}"


def verdict(data: Json) -> str:
    """Say where ours is no better than another system, for all rates and both kinds of checkpoints on the disk."""
    lines = []
    for rates in data["rates"]:
        for in_background in (False, True):
            how = "written in the background" if in_background else "that block"
            found = not_better([one for one in _sized(data, in_background) if one["rates"] == rates])
            lines += [f"- {rates}'s rates, checkpoints {how}: {words}" for words in found]
    if not lines:
        return "Ours is better than each of the others in all of these."
    return "\n".join(["Where ours is not better:", "", *(wrapped(line, "  ") for line in lines)])


def slower(rows: Sequence[Json], kinds: Sequence[str]) -> list[str]:
    """Return a sentence for each of ours that some other system was faster than, after a fault of these kinds."""
    lost = {(row["system"], row["fault"]): row["lost_s"] for row in rows if row["faults"]}
    sentences = []
    for own in (name for name in NAMES if name.startswith("unbroken")):
        parts = []
        for kind in kinds:
            own_s = lost.get((own, kind), 0.0)
            others = [name for name in NAMES if not name.startswith("unbroken")]
            faster = [name for name in others if lost.get((name, kind), own_s) < own_s]
            words = ", ".join(f"{NAMES[name]} {lost[name, kind]:.1f} s" for name in faster)
            if words:
                parts.append(f"{KIND_NAMES[kind]} {own_s:.1f} s ({words})")
        if parts:
            sentences.append(f"*{NAMES[own]}* took longer than others, as measured: {'; '.join(parts)}.")
    return sentences


def not_better(sized: Sequence[Json]) -> list[str]:
    """Return a sentence for each of ours that some other system does as well as, or better; sizes in brackets."""
    sentences = []
    for own in (name for name in NAMES if name.startswith("unbroken")):
        parts = []
        for word, sense in (("ahead", "worse than"), ("same", "no better than")):
            places: dict[str, list[str]] = {}
            for one in sized:
                if one["against"].get(own) == word and not one["system"].startswith("unbroken"):
                    places.setdefault(NAMES[one["system"]], []).append(f"{one['gpus']:,}")
            if places:
                others = "; ".join(f"{name} ({', '.join(sizes)} GPUs)" for name, sizes in places.items())
                parts.append(f"{sense} {others}")
        if parts:
            sentences.append(f"*{NAMES[own]}* is {'; and '.join(parts)}.")
    return sentences


def example(data: Json) -> str:
    """Return the arithmetic for Llama 3, beside what the simulation says."""
    rates = next(iter(data["rates"]))
    head = (
        "system",
        "saves every",
        "that costs",
        "a fault: work lost",
        "detect",
        "restart",
        "restore",
        "ettr by Daly",
        "simulated",
    )
    lines = []
    for one in _sized(data, False):
        if one["rates"] != rates or one["gpus"] != EXAMPLE_GPUS:
            continue
        every_s, blocking_s = one["every_s"], one["blocking_s"]
        fault_s = one["detect_s"] + one["restart_s"] + one["restore_s"]
        by_formula = daly_ettr(one["interrupted_every_s"], blocking_s, fault_s, every_s)
        seconds = [f"{value:.0f} s" for value in (every_s / 2, one["detect_s"], one["restart_s"], one["restore_s"])]
        lines.append(
            [
                NAMES[one["system"]],
                duration(every_s),
                f"{blocking_s / (every_s + blocking_s):.2%}",
                *seconds,
                f"{by_formula:.4f}",
                f"{one['ettr']:.4f}",
            ]
        )
    return table(head, lines, 1)


def assumptions_table(data: Json) -> str:
    """Return what the laptop did not measure."""
    lines = [[f"`{one['name']}`", one["value"], one["for"], one["source"]] for one in data["assumptions"]]
    return table(("input", "value", "what for", "source"), lines, 4)


def _sized(data: Json, in_background: bool) -> list[Json]:
    return [one for one in data["sized"] if one["in_background"] is in_background]


def duration(seconds: float) -> str:
    """Return a duration for people."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def table(head: Sequence[str], lines: Sequence[Sequence[str]], num_left: int) -> str:
    """Return a markdown table whose first columns hold words."""
    marks = ["---"] * num_left + ["--:"] * (len(head) - num_left)
    rows = [f"| {' | '.join(head)} |", f"|{'|'.join(marks)}|", *(f"| {' | '.join(line)} |" for line in lines)]
    return "\n".join(rows)


def wrapped(text: str, indent: str = "") -> str:
    """Return a paragraph in lines of the pages' width."""
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > WIDTH:
            lines.append(line)
            line = indent + word
        else:
            line = f"{line} {word}" if line.strip() else line + word
    return "\n".join([*lines, line])


_MAKERS = {
    "cost": short_table,
    "cost-run": run_words,
    "cost-measured": measured_table,
    "cost-phases": phases_table,
    "cost-sized": sized_table,
    "cost-background": lambda data: sized_table(data, in_background=True),
    "cost-verdict": verdict,
    "cost-example": example,
    "cost-assumptions": assumptions_table,
}
