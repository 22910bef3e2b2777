"""The benchmarks work, at a size whose figures mean nothing: no time is asserted."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.benchmarks import __main__ as benchmarks
from tests.benchmarks import bench_login
from tests.benchmarks.measure import TINY, Figure, interleaved


@pytest.mark.parametrize("name", benchmarks.benchmarks())
def test_each_benchmark_measures_both_sides(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_login, "IMPORT_TORCH", ("-c", "pass"))  # seconds of work that this test does not need
    threads = torch.get_num_threads()
    out = tmp_path / "new" / "folder"
    assert benchmarks.main([str(out), f"only={name}"], TINY) in (0, 1)  # met or missed, by figures that mean nothing
    assert torch.get_num_threads() == threads
    content = json.loads((out / "benchmarks.json").read_text())
    assert {"cores", "python", "torch"} <= content["machine"].keys()
    assert content["figures"]
    for figure in content["figures"]:
        assert len(figure["ours"]) == len(figure["theirs"]) >= TINY.rounds
        assert min(figure["ours"] + figure["theirs"]) > 0
        assert isinstance(figure["met"], bool)


def test_a_long_benchmark_runs_only_if_it_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(benchmarks.benchmarks()) - set(benchmarks.chosen([])) == {"cifar_training"}
    out = capsys.readouterr().out
    assert "left out" in out
    assert out.endswith("make bench ONLY=cifar_training\n")
    assert list(benchmarks.chosen(["step", "cifar_training"])) == ["step", "cifar_training"]


def fake(monkeypatch: pytest.MonkeyPatch, *targets: str) -> None:
    """Makes ``main`` run one benchmark, with a figure of ratio 1 for each target."""
    found = [Figure(f"figure {i}", "s", "us", "them", target, [1.0], [1.0]) for i, target in enumerate(targets)]
    monkeypatch.setattr(benchmarks, "chosen", lambda names: {"fake": SimpleNamespace(figures=lambda size: found)})


def test_status_1_and_last_lines_with_the_missed_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake(monkeypatch, "<= 0.9", "<= 1", ">= 1.1")
    assert benchmarks.main([str(tmp_path)], TINY) == 1
    file = tmp_path / "benchmarks.json"
    last = ["missed: figure 0: 1, target <= 0.9", "missed: figure 2: 1, target >= 1.1"]
    assert capsys.readouterr().out.splitlines()[-3:] == [str(file), *last]
    assert [figure["met"] for figure in json.loads(file.read_text())["figures"]] == [False, True, False]
    fake(monkeypatch, "<= 1", ">= 1")
    assert benchmarks.main([str(tmp_path)], TINY) == 0


@pytest.mark.parametrize(("words", "line"), [
    (["only=cifar_trainin"], "did you mean 'cifar_training'?"),
    (["only=login,x"], "only=x: must be some of "),
    (["/dev/null/x"], "cannot be written"),
])  # fmt: skip
def test_status_2_and_one_line_for_an_invalid_argument(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmarks.main(words, TINY) == 2
    err = capsys.readouterr().err
    assert line in err
    assert err.count("\n") == 1


def test_ratios_are_of_medians_of_means_or_of_pairs() -> None:
    ours, theirs = [1.0, 2.0, 6.0], [2.0, 8.0, 5.0]
    found = {
        of: Figure("", "", "", "", "<= 1", ours, theirs, ratio_of=of).ratio for of in ("medians", "means", "pairs")
    }
    assert found == pytest.approx({"medians": 0.4, "means": 0.6, "pairs": 0.5})


def test_a_figure_compares_its_ratio_with_its_target() -> None:
    slow = Figure("n", "s", "us", "them", "<= 0.20", [0.3, 9.0, 0.2], [1.0, 1.0, 2.0])
    assert slow.ratio == pytest.approx(0.3)
    assert not slow.met
    assert str(slow) == "n: us 0.3 s (0.2 to 9), them 1 s (1 to 2), ratio 0.3, target <= 0.20, MISSED"
    fast = Figure("n", "samples/s", "us", "them", ">= 12", [24000.0], [2000.0], "random images")
    assert fast.met
    assert str(fast).endswith("24,000 samples/s (24,000 to 24,000), them 2,000 samples/s (2,000 to 2,000), ratio 12, "
                              "target >= 12, met  [random images]")  # fmt: skip


def test_sides_take_turns_and_the_first_round_is_not_counted() -> None:
    order: list[str] = []

    def side(name: str) -> float:
        order.append(name)
        return float(len(order))

    values = interleaved(3, {"a": lambda: side("a"), "b": lambda: side("b")})
    assert "".join(order) == "baabbaab"
    assert values == {"a": [3.0, 6.0, 7.0], "b": [4.0, 5.0, 8.0]}
