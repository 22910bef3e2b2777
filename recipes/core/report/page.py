"""One HTML file about runs, without scripts and requests to a network. Each text from a file is
escaped.
"""

import contextlib
import html
import itertools
import math
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from recipes.core import errors, files
from recipes.core.files import Json
from recipes.core.report import figure, style
from recipes.core.report.figure import Series
from recipes.core.run import attempt as attempts
from recipes.core.run import directory, efficiency, ledger, record, rows, table
from recipes.core.run.attempt import Attempt
from recipes.core.run.record import Record, State
from recipes.core.run.rows import Row, number

LONGEST = 500  # characters of a text from a file
# runs in a figure; metrics; failed ranks of an attempt; ranks in a table
MOST_RUNS = 24
MOST_METRICS = 64
MOST_RECORDS = 16
MOST_RANKS = 64
BAR_PX = 18  # height of an attempt in the bars of time
FAILURE = ("rank", "host", "kind", "error")  # what is shown of the record of a failed rank
# Title and label of the y axis, and whether it includes 0. Other metrics of an evaluation have
# their name.
COLUMNS = {
    "loss": ("Loss", "mean loss per sample", False),
    "val_loss": ("val_loss", "mean loss per sample", False),
    "val_top1": ("val_top1", "fraction of samples", False),
    "val_top5": ("val_top5", "fraction of samples", False),
    "lr": ("Learning rate", "learning rate", False),
    "samples_per_second": ("Throughput", "samples/s, all ranks", True),
    "data_wait": ("Waiting for data", "share of a step, rank 0", True),
    "forward_backward": ("Forward and backward pass", "share of a step, rank 0", True),
    "communication": ("Waiting for gradients of other ranks", "share of a step, rank 0", True),
    "optimizer": ("Optimiser", "share of a step, rank 0", True),
    "tflops": ("Arithmetic", "TFLOP/s per rank", True),
    "mfu": ("Model FLOP/s utilisation", "share of the GPU's peak", True),
    "memory_gb": ("Memory", "GB per node", True),
    "gpu_memory_gb": ("GPU memory", "GB, highest so far", True),
    "cpus_used": ("CPUs", "busy CPUs per node", True),
    "gpu_energy_kj": ("GPU energy", "kJ of all GPUs since the last value", True),
}


class Start(NamedTuple):
    """A start of a run: what was known when the attempt was opened, and how it ended."""

    attempt: Attempt
    facts: Json
    end: Json


@dataclass(frozen=True)
class Shown:
    """A run and what the page shows of it. entry: in the table. starts: oldest first. hosts: of
    each rank; [] if unknown.
    """

    run: Record
    entry: dict[str, Any]
    rows: list[Row]
    starts: list[Start]
    hosts: list[str]
    ranks: int
    nodes: int


def read(folder: Path, groups: int) -> Shown:
    """Reads a run directory. groups: as for `rows.thinned`."""
    run = record.read(folder)
    starts = []
    for attempt in reversed(run.attempts):
        end = attempt.read("ended.json") or attempt.only_own(run.status)
        starts.append(Start(attempt, attempt.facts(), end))
    hosts = _hosts(run.facts)
    ranks, nodes = (number(run.summary.get(name)) for name in ("world_size", "num_nodes"))
    size = (int(ranks), int(nodes)) if ranks > 0 and nodes > 0 else (len(hosts), len(set(hosts)))
    every = rows.thinned(folder, groups)
    return Shown(run, table.entry(run), every, starts, hosts, *size)


def _hosts(facts: Json) -> list[str]:
    """The host of each rank of an attempt; [] if they are unknown."""
    hosts = facts.get("hosts")
    return list(map(str, hosts)) if isinstance(hosts, list) else []


def section(folder: Path, groups: int) -> tuple[Shown, list[str]]:
    """A run, and its own part of the page: a table of facts, and the details."""
    shown = read(folder, groups)
    return shown, [_table((), [*_head_of_run(shown).items()]), *_details(shown)]


def page(folders: Sequence[Path]) -> tuple[str, int]:
    """The page, and the number of runs in it. One that cannot be read is skipped, and reported with
    one line.
    """
    groups = figure.MOST_POINTS // (2 * min(len(folders), MOST_RUNS))
    sections = table.read_each(folders, lambda folder: section(folder, groups))
    every = [shown for shown, _ in sections]
    title = f"{len(every)} runs"
    if len(every) == 1:
        title = f"{every[0].run.recipe} {every[0].run.folder.name}"
    body = [style.HEAD.format(title=_text(title), sheet=style.SHEET)]
    if len(every) > 1:
        head, *lines = table.cells([shown.entry for shown in every])
        body += [_table(head, lines), *_training(every[:MOST_RUNS]), *_scaling(every)]
    for shown, (facts, *details) in sections:
        body += [f"<h2>{_text(shown.run.folder)}</h2>", facts]
        body += [*(_training(every) if len(every) == 1 else ()), *details]
    body.append(f'<p class="note">Written {_moment(time.time())}.</p></main></body></html>\n')
    return "\n".join(body), len(every)


def _style(index: int) -> str:
    """The classes of a run's line in the style sheet."""
    return f"c{index % 8} d{index // 8 % 3}"


def _training(every: Sequence[Shown]) -> list[str]:
    """Figures over the steps. Of one run, with its attempts as vertical lines; of several runs,
    with a legend.
    """
    marks = list[figure.Point]()
    if len(every) == 1:
        marks = _later_attempts(every[0])
        note = "Each dashed line marks the start of a later attempt, with its number."
        above = f'<p class="note">{note if marks else ""}</p>'
    else:
        note = f"The figures show at most {MOST_RUNS} runs."
        above = f'{_legend(every)}<p class="note">{note}</p>'

    figures = _by_step(every, marks) + _over_time(every) or "There are no metrics."
    return ["<h2>Training</h2>", above, f'<div class="figures">{figures}</div>']


def _later_attempts(shown: Shown) -> list[figure.Point]:
    """The first step and the number of each attempt but the first."""
    begun = [start for start in shown.starts if start.attempt.has_begun]
    marks = [(number(start.facts.get("step")), start.attempt.number) for start in begun]
    return [mark for mark in marks[1:] if math.isfinite(mark[0])]


def _legend(every: Sequence[Shown]) -> str:
    """The line style and the folder of each run."""
    items = ""
    for index, shown in enumerate(every):
        path = f'<path class="line {_style(index)}" d="M2 4H26"/>'
        line = f'<svg viewBox="0 0 28 8" aria-hidden="true">{path}</svg>'
        items += f"<li>{line}{_text(shown.run.folder)}</li>"
    return f'<ul class="legend">{items}</ul>'


def _by_step(every: Sequence[Shown], marks: Sequence[figure.Point]) -> str:
    """A figure of each metric; "" without metrics. marks: vertical lines."""
    all_rows = [row for shown in every for row in shown.rows]
    steps = [row["step"] for row in all_rows]
    titles = dict(COLUMNS)
    for row in all_rows:
        for name, value in row.items():
            if type(value) is float and name not in table.NO_RESULTS:
                titles.setdefault(name, (name, name, False))

    figures = ""
    for name, (title, unit, zero) in itertools.islice(titles.items(), MOST_METRICS):
        series = list[Series]()
        for index, shown in enumerate(every):
            points = [(float(row["step"]), number(row[name])) for row in shown.rows if name in row]
            series.append((errors.shown(shown.run.folder), points, _style(index)))
        labels = ("optimiser step", errors.shown(unit))
        figures += figure.figure(errors.shown(title), labels, series, steps, marks, zero)
    if len(titles) > MOST_METRICS:
        figures += f'<p class="note">Only {MOST_METRICS} metrics are shown.</p>'
    return figures


def _over_time(every: Sequence[Shown]) -> str:
    """A figure of the throughput of each attempt by hours since the first row of its run."""
    series = list[Series]()
    for index, shown in enumerate(every):
        timed = [
            row
            for row in shown.rows
            if "samples_per_second" in row and math.isfinite(number(row.get("time")))
        ]
        points = defaultdict[str, list[figure.Point]](list)
        for row in timed:
            hours = (row["time"] - timed[0]["time"]) / 3600
            speed = number(row["samples_per_second"])
            points[str(row.get("attempt"))].append((hours, speed))
        name = errors.shown(shown.run.folder)
        series += [(name, of_attempt, _style(index)) for of_attempt in points.values()]
    labels = ("hours since the first row", "samples/s, all ranks")
    return figure.figure("Throughput over time", labels, series, zero=True)


def _scaling(every: Sequence[Shown]) -> list[str]:
    """For each recipe with runs of several sizes: throughput by ranks, the ideal line, the
    efficiency.
    """
    parts = []
    for recipe in dict.fromkeys(shown.run.recipe for shown in every):
        speeds = [
            (shown.ranks, shown.nodes, number(shown.entry["results"].get("samples_per_second")))
            for shown in every
            if shown.run.recipe == recipe
        ]
        sizes = sorted(size for size in speeds if size[0] and size[2] > 0)
        if len({size[:2] for size in sizes}) < 2:
            continue
        base = sizes[0][2] / sizes[0][0]
        measured = ("measured", [(ranks, speed) for ranks, _, speed in sizes], "c0 d0")
        ideal = ("ideal", [(ranks, base * ranks) for ranks, _, _ in sizes], "c7 d1")
        title = f"Scaling of {errors.shown(recipe)}"
        labels = ("ranks", "samples/s, all ranks")
        drawn = figure.figure(title, labels, [ideal, measured], zero=True)
        lines = []
        for ranks, nodes, speed in sizes:
            best = base * ranks
            lines.append([ranks, nodes, f"{speed:,.1f}", f"{best:,.1f}", f"{speed / best:.0%}"])
        note = "Dashed line: ideal scaling from the run with the fewest ranks."
        parts += [
            f'<h2>Scaling</h2><div class="figures">{drawn}</div>',
            f'<p class="note">{note}</p>',
            _table(["ranks", "nodes", "samples/s", "ideal", "efficiency"], lines),
        ]
    return parts


def _head_of_run(shown: Shown) -> dict[str, object]:
    """What the head of a run shows, without what is unknown."""
    run = shown.run
    times = [number(start.facts.get("time")) for start in shown.starts]
    first = next(filter(math.isfinite, times), math.nan)
    versions = run.summary.get("versions")
    begun = sum(start.attempt.has_begun for start in shown.starts)
    values: dict[str, object] = {
        "recipe": run.recipe,
        "state": run.state.value,
        "reason": run.note,
        "step": run.step,
        "best": ", ".join(f"{name} {table.text(value)}" for name, value in run.best.items()),
        "job": run.facts.get("job") or run.job.get("job_id"),
        "efficiency": efficiency.verdict(shown.rows, run.facts, run.values),
        "hosts": ", ".join(dict.fromkeys(shown.hosts)),
        "ranks": shown.ranks or "",
        "nodes": shown.nodes or "",
        "start": _moment(first),
        "restarts": max(0, begun - 1),
        **{name: table.text(value) for name, value in shown.entry["results"].items()},
        **{name: run.summary.get(name) for name in ("device", "backend", "git_commit")},
        **(versions if isinstance(versions, dict) else {}),
    }
    return {name: value for name, value in values.items() if value not in (None, "")}


def _details(shown: Shown) -> list[str]:
    """Where the time went, attempts with the failures of their ranks, the doctor's findings,
    checkpoints, keys.
    """
    folder = shown.run.folder
    keys = [(name, value) for name, value in shown.run.values.items() if value != ""]
    return [
        *_step_times(shown),
        *_ledger(shown.run),
        *_attempts(shown),
        _findings(folder),
        _table(["step", "size", ""], _checkpoints(folder / "checkpoints"), "Checkpoints"),
        _table(["key", "value"], keys, "Keys"),
    ]


def _step_times(shown: Shown) -> list[str]:
    """The parts of a step of rank 0, and the newest step time of each rank."""
    shares = efficiency.shares(shown.rows)
    parts = [[name.replace("_", " "), f"{share:.1%}"] for name, share in shares.items()]
    of_parts = "Time of a step, rank 0 (forward backward includes communication)"

    newest = Row()
    for row in shown.rows:
        if rows.numbers(row.get("rank_step_s")):
            newest = row
    times = rows.numbers(newest.get("rank_step_s"))[:MOST_RANKS]
    hosts: list[str] = []
    for attempt, facts, _ in shown.starts:
        if attempt.number == newest.get("attempt"):
            hosts = _hosts(facts)[: len(times)]
    ranks = []
    for rank, (seconds, host) in enumerate(itertools.zip_longest(times, hosts)):
        ranks.append([rank, host, f"{seconds:.4g}"])
    of_ranks = "Ranks (without the wait for other ranks)"
    return [
        _table(["part of a step", "share"], parts, of_parts),
        _table(["rank", "host", "seconds per step"], ranks, of_ranks),
    ]


def _attempts(shown: Shown) -> list[str]:
    """Each attempt with its end, and the ranks that failed in them."""
    lines = list[list[object]]()
    failed = list[list[object]]()
    for attempt, facts, end in shown.starts:
        opened = _moment(facts.get("time"))
        began = facts.get("step") if attempt.has_begun else "not begun"
        state = end.get("state", "not recorded")
        reason = end.get("line") or end.get("reason")
        job = facts.get("job")
        lines.append([attempt.number, job, opened, began, state, end.get("kind"), reason])
        for failure in attempts.records(attempt)[:MOST_RECORDS]:
            failed.append([attempt.number, *map(failure.get, FAILURE)])

    head = ["attempt", "job", "start", "began at step", "state", "kind", "reason"]
    title = f"Failed ranks (at most the first {MOST_RECORDS} of each attempt)"
    return [
        _table(head, lines, "Attempts"),
        _table(["attempt", *FAILURE], failed, title),
    ]


def _findings(folder: Path) -> str:
    """What the doctor has found, with the hosts."""
    verdict = files.read_json(folder / directory.DOCTOR / "doctor.json")
    hosts = dict(enumerate(verdict.get("hosts") or ()))
    lines = []
    for finding in verdict.get("entries") or ():
        nodes = ", ".join(str(hosts.get(node, node)) for node in finding["nodes"])
        lines.append((nodes, finding["what"], finding["fix"]))
    return _table(["nodes", "finding", "fix"], lines, "Findings of the doctor")


def _ledger(run: Record) -> list[str]:
    """Where the time of each attempt went: a bar, and a table with their sum."""
    entries = ledger.of_attempts(run.folder, run.end, run.state is State.running)
    if not entries:
        return []
    scale = 1000 / max(1e-3, *(entry["wall_s"] for entry in entries))
    bars = ""
    for row, entry in enumerate(entries):
        at = 0.0
        for place, cause in enumerate(ledger.CAUSES):
            seconds = entry["seconds"].get(cause, 0.0)
            width = seconds * scale
            size = f'width="{width:.1f}" height="{BAR_PX - 3}"'
            bars += f'<rect class="{_bar(place)}" x="{at:.1f}" y="{BAR_PX * row}" {size}>'
            bars += f"<title>attempt {row}: {cause} {record.ago(seconds)}</title></rect>"
            at += width

    names = ""
    for place, cause in enumerate(ledger.CAUSES):
        rect = f'<rect class="{_bar(place)}" width="28" height="8"/>'
        names += f'<li><svg viewBox="0 0 28 8" aria-hidden="true">{rect}</svg>{cause}</li>'

    head, *lines = ledger.cells([*entries, ledger.total(entries)])
    numbers = [*range(len(entries)), "all"]
    box = f"0 0 1000 {BAR_PX * len(entries)}"
    return [
        f'<h3>Time of each attempt</h3><ul class="legend">{names}</ul>',
        f'<svg class="bars" viewBox="{box}" role="img" aria-label="time of each attempt">',
        f"{bars}</svg>",
        _table(["attempt", *head], [[n, *line] for n, line in zip(numbers, lines, strict=True)]),
    ]


def _bar(place: int) -> str:
    """The classes of a cause's bars: more causes than colours."""
    return f"c{place % 8}{' pale' * (place >= 8)}"


def _checkpoints(folder: Path) -> list[list[object]]:
    """Step, size and marks (latest, best) of each checkpoint."""
    marks = dict[str, str]()
    lines = list[list[object]]()
    for mark in ("latest", "best"):
        with contextlib.suppress(OSError, ValueError):
            name = files.read_bounded(folder / mark, LONGEST).decode().strip()
            marks[name] = f"{marks.get(name, '')} {mark}"
    sizes = Counter[str]()
    for part in folder.glob("step-*"):  # also the rows of other ranks
        with contextlib.suppress(OSError):  # a run that is running removes old checkpoints
            sizes[part.name.partition(".")[0]] += part.stat().st_size
    for path in sorted(folder.glob("step-*.pt")):
        step = path.stem.removeprefix("step-").lstrip("0")
        lines.append([step, files.size_text(sizes[path.stem]), marks.get(path.name)])
    return lines


def _moment(time_s: object) -> str:
    with contextlib.suppress(OverflowError, ValueError, OSError):
        moment = datetime.fromtimestamp(number(time_s), timezone.utc)
        return f"{moment:%Y-%m-%d %H:%M:%S} UTC"
    return ""


def _text(value: object) -> str:
    return html.escape(errors.shown("" if value is None else value, LONGEST))


def _table(head: Sequence[str], lines: Sequence[Sequence[object]], title: str = "") -> str:
    """A table with a title above it; "" without lines."""
    if not lines:
        return ""
    top = "".join(f'<th scope="col">{_text(cell)}</th>' for cell in head)
    body = "".join(
        f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in line)}</tr>" for line in lines
    )
    name = f"<h3>{title}</h3>" if title else ""
    scroll = f'<div class="scroll" tabindex="0" role="region" aria-label="{title or "table"}">'
    rows = f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody>"
    return f"{name}{scroll}<table>{rows}</table></div>"
