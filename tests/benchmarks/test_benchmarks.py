"""The benchmarks work, at a size whose figures mean nothing: no time is asserted."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.benchmarks import __main__ as benchmarks
from tests.benchmarks import bench_login
from tests.benchmarks.measure import TINY, Figure

LONG = ("cifar_training", "collectives", "doctor", "llm", "memory", "step")


NAMES = benchmarks.benchmarks()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in NAMES]
)
def test_each_benchmark_measures_both_sides(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "llm":
        pytest.importorskip("trl")
    # seconds of work that this test does not need
    monkeypatch.setattr(bench_login, "IMPORT_TORCH", ("-c", "pass"))
    torch.set_num_threads(2)
    out = tmp_path / "new" / "folder"
    status = benchmarks.main([str(out), f"only={name}"], TINY)
    assert status in (0, 1)  # met or missed, by figures that mean nothing
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    content = json.loads((out / "benchmarks.json").read_text())
    assert {"cores", "python", "torch"} <= content["machine"].keys()
    assert content["figures"]
    for figure in content["figures"]:
        assert len(figure["ours"]) == len(figure["theirs"]) >= TINY.rounds
        assert min(figure["ours"] + figure["theirs"]) > 0
        assert isinstance(figure["met"], bool)


def fake(monkeypatch: pytest.MonkeyPatch, *targets: str) -> None:
    """Makes ``main`` run one benchmark, with a figure of ratio 1 for each target."""
    made = []
    for i, target in enumerate(targets):
        made.append(Figure(f"figure {i}", "s", "us", "them", target, [1.0], [1.0]))
    monkeypatch.setattr(
        benchmarks, "chosen", lambda names: {"fake": SimpleNamespace(figures=lambda size: made)}
    )


def test_status_1_and_last_lines_with_the_missed_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake(monkeypatch, "<= 0.9", "<= 1", ">= 1.1")
    assert benchmarks.main([str(tmp_path)], TINY) == 1
    file = tmp_path / "benchmarks.json"
    last = ["missed: figure 0: 1, target <= 0.9", "missed: figure 2: 1, target >= 1.1"]
    assert capsys.readouterr().out.splitlines()[-3:] == [str(file), *last]
    content = json.loads(file.read_text())
    assert [figure["met"] for figure in content["figures"]] == [False, True, False]
    fake(monkeypatch, "<= 1", ">= 1")
    assert benchmarks.main([str(tmp_path)], TINY) == 0
