"""Files of another user's run may have any content: each command ends, with one line at most."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from recipes import doctor, export, report
from recipes.core import errors
from recipes.core.errors import InputError, Kind
from recipes.core.run import attempt as attempts
from recipes.core.run import directory

VALUES = (
    '"text"',
    "NaN",
    "-1e308",
    "1" + "0" * 400,
    "null",
    "[[1], null]",
    '{"a": {"b": [1]}}',
    r'"\ud800\u0000\n"',
)
WHOLE = ("", "\0", "not: [json", "[" * 100_000, *VALUES)
COMMANDS: dict[str, Callable[[str], object]] = {
    "explain": lambda run: doctor.main(["explain", run], {}),
    "report": lambda run: report.main([run]),
    "html": lambda run: report.main([run, f"html={run}/page.html"]),
    "export": lambda run: export.main([run, "to=tensorboard"]),
}


def malformed(text: str) -> Iterator[str]:
    """Other contents of a file: the whole, all values at once, and one value after the other."""
    yield from WHOLE
    keys = json.loads(text.splitlines()[-1] if text.startswith('{"') else text)
    for value in VALUES:
        yield json.dumps(dict.fromkeys(keys, "@")).replace('"@"', value)
    for key in keys:
        yield json.dumps({name: keys[name] for name in keys if name != key})
        yield json.dumps({**keys, key: "@"}).replace('"@"', '[{"a": null}]')


def make(run: Path, state: str) -> None:
    """A run that has failed, or is done."""
    attempt = attempts.open_next(run, "toy", {}, ["a", "b"])
    attempts.begin(attempt, 0, own=False)
    behind = {"rank": 1, "host": "b", "at": "step 3"}
    for rank, kind in enumerate((Kind.error, Kind.timeout)):
        attempts.record(attempt, rank=rank, host="a", kind=kind, error="x", behind=behind)
    directory.write_status(run, state, attempt=0, step=3, reason="x", kind=Kind.error)
    first = {"rank": 0, "host": "a"}
    ended = {"state": state, "kind": "error", "line": "x", "first": first, "time": 1.0}
    finding = {"what": "x", "fix": "y", "nodes": [0], "bad": True}
    files = {
        "attempts/0000/ended.json": ended,
        "doctor/doctor.json": {"entries": [finding], "hosts": ["a"]},
        "exported.json": {"tensorboard": {"step": 1, "row": "null", "id": "x"}},
        "job.yaml": {"recipe": "toy", "job_id": "7", "arguments": ["lr=1"], "log": "x.log"},
        "summary.json": {"world_size": 2, "num_nodes": 1, "loss": 0.5, "best": {"loss": 0.5}},
        "config.yaml": {"lr": 0.1, "best_metric": "loss", "global_batch_size": 4},
        "metrics.jsonl": {"step": 1, "time": 1.0, "loss": 0.5, "rank_step_s": [0.1], "attempt": 0},
    }
    for name, content in files.items():
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text(json.dumps(content) + "\n")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("command", "state"),
    [
        ("explain", "failed"),
        ("report", "failed"),
        ("html", "done"),
        ("export", "done"),
    ],
)
def test_a_malformed_file_of_a_run_costs_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, state: str
) -> None:
    monkeypatch.setenv("PATH", "/nosuch")  # no Slurm
    monkeypatch.setattr(
        "recipes.core.run.trackers.TRACKERS", {"tensorboard": lambda new: ("x", "y")}
    )
    make(tmp_path, state)
    paths = [*tmp_path.glob("*.*"), *tmp_path.glob("*/*.json"), *tmp_path.glob("attempts/*/*.json")]
    paths += tmp_path.glob("attempts/*/*/*.json")
    assert len(paths) > 10
    for path in paths:
        text = path.read_text()
        for content in malformed(text):
            path.write_text(content)
            with contextlib.suppress(InputError):  # which is one line
                COMMANDS[command](str(tmp_path))
        path.write_text(text)


def test_a_page_may_be_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    make(tmp_path, "done")
    assert report.main([str(tmp_path), "html=~/page.html"]) == 0
    assert (tmp_path / "page.html").is_file()


def test_a_report_of_no_readable_run_fails_and_writes_no_page(tmp_path: Path) -> None:
    make(tmp_path, "done")
    (tmp_path / "job.yaml").write_text('{"arguments": 3}')
    page = tmp_path / "page.html"
    assert report.main([str(tmp_path), f"html={page}"]) == errors.EXIT_CONFIG
    assert report.main([str(tmp_path)]) == errors.EXIT_CONFIG
    assert not page.exists()
