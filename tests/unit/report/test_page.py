"""The HTML page of runs: what it says, that it is well-formed, and that nothing in a run directory
breaks it.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from recipes import report
from recipes.core import files
from recipes.core.errors import ConfigError, Kind
from recipes.core.report import figure
from recipes.core.report.style import SHEET
from recipes.core.run import attempt as attempts
from recipes.core.run import directory
from tests import helpers

HOSTILE = "</title><script>alert(1)</script>\"'&<svg onload=alert(1)>\x1b[2J\ud800"
VOID = {"meta", "link"}


class Page(HTMLParser):
    """A page, taken apart. It must be well-formed, and request nothing. texts: all texts outside
    the style sheet.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        assert self.open == []
        figures = re.findall(r'<svg viewBox="0 0 420.*?</svg>', self.source, re.DOTALL)
        self.figures = [ET.fromstring(figure) for figure in figures]
        loading = {"script", "img", "iframe", "object", "image", "use", "a"}
        assert not {tag for tag, _ in self.tags} & loading
        linked = [
            attrs
            for _, attrs in self.tags
            if {"src", "href", "xlink:href", "style", "srcset"} & attrs.keys()
        ]
        assert linked == [{"rel": "icon", "href": "data:,"}]
        assert not [name for _, attrs in self.tags for name in attrs if name.startswith("on")]
        assert not re.search(r"url\(|@import|https?:", self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"] and data.strip():
            self.texts.append(data)

    def labels(self) -> list[str]:
        """The descriptions of the figures."""
        return [svg.attrib["aria-label"] for svg in self.figures]

    def paths(self, kind: str) -> list[dict[str, str]]:
        """The attributes of the first figure's paths whose class begins with ``kind``."""
        drawn = [path.attrib for path in self.figures[0].iter("path")]
        return [attributes for attributes in drawn if attributes["class"].startswith(kind)]

    def after(self, name: str) -> str:
        """The text in the cell after the one with this name."""
        return self.texts[self.texts.index(name) + 1]


def row(attempt: int, step: int, loss: float = 1.0, **more: Any) -> dict[str, Any]:
    usual = {"lr": 0.1, "samples_per_second": 100.0, "data_wait": 0.25}
    return {"attempt": attempt, "step": step, "loss": loss, **usual, **more}


def make(
    folder: Path,
    rows: list[dict[str, Any]],
    state: str = "done",
    summary: dict[str, Any] | None = None,
    **keys: Any,
) -> Path:
    """A run with one attempt, on two hosts."""
    helpers.attempt(folder, job="12", hosts=("node1", "node2"))
    with open(folder / "metrics.jsonl", "w") as file:
        for entry in rows:
            print(json.dumps(entry), file=file)
    with open(folder / "config.yaml", "w") as file:
        for name, value in keys.items():
            print(f"{json.dumps(name)}: {json.dumps(value)}", file=file)
    directory.write_status(folder, state, attempt=0, step=rows[-1]["step"] if rows else 0)
    if state == "done":
        files.write_json(folder / "summary.json", summary or {"recipe": "mnist", "val_top1": 0.5})
    return folder


def page(folder: Path, *runs: Path) -> Page:
    out = folder / "out.html"
    assert report.main([*(str(run) for run in runs or (folder,)), f"html={out}"]) == 0
    return Page(out)


def test_one_run(tmp_path: Path) -> None:
    rows = [row(0, step, 2.0 - step / 10) for step in range(1, 11)]
    for evaluated in (rows[4], rows[9]):
        evaluated["val_top1"] = evaluated["step"] / 20
    summary = {"val_top1": 0.5, "versions": {"torch": "2.99"}, "world_size": 4, "git_commit": "abc"}
    summary |= {"best": {"val_top1": 0.5, "step": 10}}
    folder = make(tmp_path / "run", rows, summary=summary, lr=0.1, name="")
    (folder / "checkpoints").mkdir(exist_ok=True)
    for step in (5, 10):
        (folder / f"checkpoints/step-{step:08d}.pt").write_bytes(bytes(123_000 * step))
    (folder / "checkpoints/step-00000010.0-1of2.rows").write_bytes(bytes(270_000))
    for mark in ("latest", "best"):
        (folder / "checkpoints" / mark).write_text("step-00000010.pt\n")
    entry = {"nodes": [1], "what": "GPU 3 is slow", "fix": "leave it out", "bad": True}
    (folder / "doctor").mkdir()
    files.write_json(
        folder / "doctor/doctor.json", {"hosts": ["node1", "node2"], "entries": [entry]}
    )
    shown = page(tmp_path, folder)
    assert [label.partition(".")[0] for label in shown.labels()] == [
        "Loss: mean loss per sample against optimiser step",
        "val_top1: fraction of samples against optimiser step",
        "Learning rate: learning rate against optimiser step",
        "Throughput: samples/s, all ranks against optimiser step",
        "Waiting for data: share of a step, rank 0 against optimiser step",
    ]
    assert all(svg.find("title") is not None for svg in shown.figures)
    assert shown.labels()[0].endswith(f"Last values: {folder}: 1 at 10")
    cells = {
        "state": "done",
        "best": "val_top1 0.5, step 10",
        "job": "12",
        "hosts": "node1, node2",
        "ranks": "2",
        "nodes": "2",
        "restarts": "0",
        "torch": "2.99",
        "git_commit": "abc",
        "lr": "0.1",
    }
    assert {name: shown.after(name) for name in cells} == cells
    assert shown.after("data wait") == "25.0%"
    assert shown.after("GPU 3 is slow") == "leave it out"
    at = shown.texts.index("1.5 MB")
    assert shown.texts[at - 1 : at + 2] == ["10", "1.5 MB", " latest best"]
    assert len(shown.source) < 50_000


def test_throughput_over_time_has_one_line_per_attempt(tmp_path: Path) -> None:
    times = [1e9, 1e9 + 3600, 1e9 + 4 * 3600, 1e9 + 5 * 3600]
    rows = [row(0, 0)]  # without a time
    rows += [row(step // 3, step, time=time) for step, time in enumerate(times, 1)]
    last = page(tmp_path, make(tmp_path / "run", rows)).figures[-1]
    assert last.attrib["aria-label"].startswith(
        "Throughput over time: samples/s, all ranks against hours since the"
    )
    drawn = [path.attrib["d"] for path in last.iter() if path.attrib.get("class") == "line c0 d0"]
    assert [d.count("M") + d.count("L") for d in drawn] == [2, 2]
    ends = re.findall(r" at (\S+?)(?:;|$)", last.attrib["aria-label"])
    assert ends == ["1", "5"]  # hours
    other = make(tmp_path / "other", [row(0, step, time=3600.0 * step) for step in (1, 3)])
    both = page(tmp_path, tmp_path / "run", other).labels()[-1]
    assert re.findall(r" at (\S+?)(?:;|$)", both) == ["1", "5", "2"]
    assert "not finite" not in page(tmp_path, tmp_path / "run").source


def test_attempts_are_marked_and_their_failures_listed(tmp_path: Path) -> None:
    rows = [row(0, step) for step in range(1, 40)]
    rows += [row(1, step, 7.0) for step in range(31, 60)]
    rows += [row(3, step, 7.5) for step in range(51, 81)]
    folder = make(tmp_path / "run", rows, state="failed")
    for step in (30, None, 50):  # attempt 2 was refused
        newest = helpers.attempt(folder, hosts=("node1", "node2"), step=step)
    first = attempts.Attempt(folder, 0)
    for rank in range(20):
        error = f"CUDA out of memory on {rank}"
        moment = 1e9 + rank
        attempts.record(
            first, rank=rank, host="node2", kind=Kind.out_of_memory, error=error, moment=moment
        )
    ended = {"state": "failed", "kind": "out-of-memory", "line": "rank 0 failed first", "time": 1e9}
    files.write_json(first.folder / "ended.json", ended)
    attempts.record(newest, rank=1, host="node2", kind=Kind.hang, error="no progress", moment=1e9)
    directory.write_status(
        folder, "failed", attempt=3, step=80, kind=Kind.hang, reason="rank 1 hung"
    )
    shown = page(tmp_path, folder)
    assert len(shown.paths("mark")) == 2
    assert [element.text for element in shown.figures[0].iter("text")].count("3") == 1
    assert shown.labels()[0].endswith(": 7.5 at 80")
    assert "rank 0 failed first" in shown.texts
    assert "rank 1 hung" in shown.texts
    assert "CUDA out of memory on 15" in shown.texts
    assert "CUDA out of memory on 16" not in shown.texts
    assert "no progress" in shown.texts
    assert shown.texts.count("not recorded") == 2  # how attempts 1 and 2 have ended
    assert shown.after("restarts") == "2"


@pytest.mark.parametrize("state", ["failed", "pending", "refused", "empty"])
def test_runs_without_metrics(tmp_path: Path, state: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    files.write_json(
        folder / "job.yaml", {"job_id": "7_1", "recipe": "mnist", "arguments": ["lr=0.5"]}
    )
    if state == "refused":
        new = helpers.attempt(folder, step=None)
        attempts.refuse({attempts.VARIABLE: str(new.folder)}, ConfigError("lr=0.5 is too large"))
    if state == "failed":
        make(folder, [], state="failed")
    if state == "empty":
        (folder / "attempts").mkdir()
    other = make(tmp_path / "other", [row(0, 1)])
    for shown in (page(tmp_path, folder), page(tmp_path, folder, other)):
        assert ("There are no metrics." in shown.texts) == (len(shown.figures) == 0)
        assert shown.after("lr") in ("0.5", "lr", "loss")
    if state == "refused":
        assert "the newest start was refused: lr=0.5 is too large" in shown.texts


def test_values_that_are_not_finite_are_gaps(tmp_path: Path) -> None:
    losses = [1.0, math.nan, 3.0, 4.0, math.inf, 1e300, math.nan, 5.0]
    rows = [row(0, step, loss, val_f1=math.nan) for step, loss in enumerate(losses, 1)]
    folder = make(tmp_path / "run", rows)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 9, "loss": null, "lr": "x"}\n{"step": 10, "lo')
    shown = page(tmp_path, folder)
    line = shown.paths("line")[0]["d"]
    assert line.count("M") == 3
    assert line.count("L") == 1
    assert "Values that are not finite: 5" in shown.texts
    for svg in shown.figures:
        for element in svg.iter():
            assert not re.search("nan|inf", element.attrib.get("d", ""))
    assert not any("val_f1" in label for label in shown.labels())


def test_a_bar_of_each_attempt_shows_where_its_time_went(tmp_path: Path) -> None:
    for at in (100.0, 200.0):
        attempt = helpers.attempt(tmp_path / "run", job="1", time=at)
        files.write_json(attempt.folder / "begun.json", {"step": 0, "begun_at": at + 25})
        files.write_json(attempt.folder / "ended.json", {"state": "preempted", "time": at + 50})
    status = {"state": "preempted", "attempt": 1, "step": 0, "updated": 250.0}
    files.write_json(tmp_path / "run/status.json", status)
    shown = page(tmp_path, tmp_path / "run")
    bars = [attributes for tag, attributes in shown.tags if tag == "rect" and "x" in attributes]
    drawn = [(bar["x"], bar["y"]) for bar in bars if float(bar["width"] or 0)]
    assert drawn == [("0.0", "0"), ("250.0", "0"), ("0.0", "18"), ("500.0", "18"), ("750.0", "18")]
    assert "attempt 1: queue 0:00:50" in shown.texts
    assert shown.after("all") == "0:02:30"
    assert shown.after("start") == "1970-01-01 00:01:40 UTC"


def test_texts_of_files_are_escaped(tmp_path: Path) -> None:
    encodable = HOSTILE.replace("\ud800", "")
    name = encodable.replace("/", "∕").replace("\x1b", "")
    summary = {
        "recipe": HOSTILE,
        "versions": {HOSTILE: HOSTILE},
        "git_commit": HOSTILE,
        HOSTILE: 0.5,
    }
    keys = {encodable: encodable}
    rows = [row(0, step, **{HOSTILE: 0.5}) for step in range(1, 4)]
    done = make(tmp_path / f"1{name}", rows, summary=summary, **keys)
    failed = make(tmp_path / f"2{name}", rows[:1], state="failed", lr=1, **keys)
    for folder in (done, failed):
        facts = {"job": HOSTILE, "hosts": [HOSTILE], "recipe": HOSTILE}
        opened = helpers.read(folder / "attempts/0000", "opened")
        files.write_json(folder / "attempts/0000/opened.json", opened | facts)
        attempts.record(
            attempts.Attempt(folder, 0), rank=0, host=HOSTILE, kind=Kind.error, error=HOSTILE
        )
        (folder / "doctor").mkdir()
        entry = {"nodes": [0, 7], "what": HOSTILE, "fix": HOSTILE}
        files.write_json(folder / "doctor/doctor.json", {"hosts": [HOSTILE], "entries": [entry]})
        (folder / "checkpoints").mkdir(exist_ok=True)
        (folder / f"checkpoints/step-{name}.pt").touch()
        (folder / "checkpoints/latest").write_text(encodable)
    for runs in ((done,), (failed,), (done, failed)):
        shown = page(tmp_path, *runs)
        assert "\x1b" not in shown.source
        assert sum("<script>alert(1)</script>" in text for text in shown.texts) > 8


def test_several_runs_and_their_scaling(tmp_path: Path) -> None:
    sizes = ((8, 2, 640.0), (2, 1, 200.0), (4, 1, 360.0))
    runs = []
    for ranks, nodes, speed in sizes:
        rows = [row(0, 1), row(0, 2, ranks)]
        summary = {
            "recipe": "mnist",
            "world_size": ranks,
            "num_nodes": nodes,
            "samples_per_second": speed,
        }
        folder = tmp_path / f"run{ranks}"
        runs.append(make(folder, rows, lr=ranks / 10, seed=1, summary=summary))
    shown = page(tmp_path, *runs)
    head = shown.texts[shown.texts.index("run") :]
    assert head[:6] == ["run", "state", "step", "lr", "samples_per_second", "note"]
    label = (
        "Scaling of mnist: samples/s, all ranks against ranks. Last values: ideal: 800 at 8; "
        "measured: 640 at 8"
    )
    assert shown.labels()[-1] == label
    table = shown.texts[shown.texts.index("efficiency") + 1 :]
    assert " ".join(table[:15]) == "2 1 200.0 200.0 100% 4 1 360.0 400.0 90% 8 2 640.0 800.0 80%"
    lines = [path["class"] for path in shown.paths("line")]
    assert lines == ["line c0 d0", "line c1 d0", "line c2 d0"]
    for count in (1, 2):
        labels = page(tmp_path, *runs[:count]).labels()
        assert any("Scaling" in label for label in labels) == (count == 2)
    again = make(tmp_path / "again", [row(0, 1)], summary=summary)  # of the same size
    assert not any("Scaling" in label for label in page(tmp_path, runs[-1], again).labels())
    of_toy = {"recipe": "toy", "world_size": 16, "num_nodes": 4, "samples_per_second": 9.0}
    runs.append(make(tmp_path / "toy", [row(0, 1)], summary=of_toy))
    opened = tmp_path / "toy/attempts/0000/opened.json"
    files.write_json(opened, {**files.read_json(opened), "recipe": "toy"})
    assert page(tmp_path, *runs).labels()[-1] == label


def test_many_metrics_stay_small(tmp_path: Path) -> None:
    names = {f"metric{number}": 0.5 for number in range(1000)}
    shown = page(tmp_path, make(tmp_path / "run", [row(0, step, **names) for step in (1, 2)]))
    assert len(shown.figures) < 100
    assert "Only 64 metrics are shown." in shown.texts


def test_many_runs_and_rows_stay_small(tmp_path: Path) -> None:
    rows = [row(0, step, math.sin(step)) for step in range(1, 3001)]
    rows[1234]["loss"] = 50.0
    first = make(tmp_path / "run0", rows)
    runs = [first, *(make(tmp_path / f"run{number}", rows[:5]) for number in range(1, 30))]
    shown = page(tmp_path, *runs)
    assert len(shown.paths("line")) == 24
    assert {"50", "40"} & {label.text for label in shown.figures[0].iter("text")}
    assert os.path.getsize(tmp_path / "out.html") < 400_000
    points = [(float(x), 50.0 if x == 777 else 0.0) for x in range(10_000)]
    kept = figure._thinned(points, 100)
    assert len(kept) <= 100
    assert (777.0, 50.0) in kept
    assert kept == sorted(kept)


@pytest.mark.parametrize(
    "ends",
    [
        (0, 1),
        (1, 90),
        (0.9, 0.977),
        (-3, 4e9),
        (1e-9, 2e-9),
        (1e15, 2e15),
        (0, 1e100),
        (-1e-300, 1e-300),
        (0, 5e-324),
    ],
)
def test_axes_have_a_few_round_ticks(ends: tuple[float, float]) -> None:
    low, high = figure._range(ends)
    ticks = figure._ticks(low, high)
    assert 2 <= len(ticks) <= 7
    assert all(low - 1e-6 * (high - low) <= tick <= high + 1e-6 * (high - low) for tick in ticks)
    assert all(tick == int(tick) for tick in figure._ticks(*figure._range([3.0]), 1.0))


def test_the_hours_of_a_short_run_have_a_scale_too() -> None:
    points = [(0.0, 7.0), (0.5, 8.0)]
    drawn = figure.figure("Throughput", ("hours", "samples/s"), [("run", points, "c0 d0")])
    below = re.findall(rf'y="{figure.BOTTOM + 17}" class="middle">([^<]*)<', drawn)
    assert below == ["0", "0.1", "0.2", "0.3", "0.4", "0.5"]


@pytest.mark.parametrize(
    ("values", "ends"),
    [
        ([0.0], (0, 1)),
        ([0.0, 0.0], (0, 1)),
        ([2.0, 2.0], (1.8, 2.2)),
        ([-2.0, -2.0], (-2.2, -1.8)),
    ],
)
def test_equal_values_have_an_axis_of_the_same_sign(
    values: list[float], ends: tuple[float, float]
) -> None:
    assert figure._range(values) == pytest.approx(ends)
    points = list(enumerate(values))
    labels = re.findall(r">(-?[0-9.]+)</text>", figure.figure("", ("", ""), [("", points, "")]))
    assert len(labels) >= 4
    assert min(map(float, labels)) >= min(0, ends[0])


def contrast(colour: str, ground: str) -> float:
    """The contrast of two colours, as WCAG 2 defines it."""
    bright = []
    for shade in (colour, ground):
        parts = [int(shade[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        )
        bright.append(0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05)
    return max(bright) / min(bright)


def test_texts_and_lines_have_contrast_in_light_and_dark() -> None:
    blocks = re.findall(r":root\{(.*?)\}", SHEET, re.DOTALL)
    schemes = [dict(re.findall(r"--(\w+):(#\w{6})", block)) for block in blocks]
    assert [len(colours) for colours in schemes] == [12, 12]
    for colours in schemes:
        for name in colours.keys() - {"bg", "grid"}:
            assert contrast(colours[name], colours["bg"]) >= 4.5, name


def test_a_page_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    make(tmp_path / "run", [row(0, 1)])
    ended = helpers.run(
        [sys.executable, "-m", "recipes.report", str(tmp_path), f"html={tmp_path}/none/out.html"]
    ).expect(3)
    assert len(ended.lines) == 1
    line = f"html='{tmp_path}/none/out.html': cannot be written (No such file or directory)"
    assert line in ended.lines[0]


def test_seconds_per_step_have_the_hosts_of_their_attempt(tmp_path: Path) -> None:
    folder = make(tmp_path / "run", [row(0, 1, rank_step_s=[0.5, 0.25])], state="running")
    helpers.attempt(folder, hosts=("node3", "node4"), step=1)
    texts = page(tmp_path, folder).texts
    start = texts.index("seconds per step") + 1
    assert texts[start : start + 6] == ["0", "node1", "0.5", "1", "node2", "0.25"]
