"""The benchmarks work, at a size whose figures mean nothing: no time is asserted."""

from __future__ import annotations

import json
from pathlib import Path
from types import NoneType

import pytest
import torch

from recipes.core.rundir import InputError
from tests.benchmarks import __main__ as benchmarks
from tests.benchmarks import bench_cifar_training, bench_login, inputs
from tests.benchmarks.measure import FULL, TINY, Figure, interleaved

WAYS = ("files, other pixels", "files, the same pixels", "packed jpeg", "packed raw")
NAMES = [
    "checkpoint, training stands still",
    "cifar, input",
    *("collectives, all_reduce", "collectives, buckets"),
    *(f"doctor, a node's part of the verdict of {count}" for count in (256, 4096)),
    *(f"images, {way}{end}" for end in ("", ", as floats") for way in WAYS),
    *("login, a right command", "login, a misspelt key"),
    *("memory, packing", "memory, loader, packed jpeg", "memory, loader, files"),
    *("mnist, input", "mnist, input and step"),
    *("step, services", "step, two ranks"),
]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a run wrote to."""
    out = tmp_path_factory.mktemp("benchmarks") / "new" / "folder"
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_login, "IMPORT_TORCH", ("-c", "pass"))  # seconds of work that this test does not need
        assert benchmarks.main([str(out)], TINY) == 0
    assert torch.get_num_threads() == threads
    return out


@pytest.mark.long
def test_every_figure_is_in_the_json_with_both_sides(measured: Path) -> None:
    content = json.loads((measured / "benchmarks.json").read_text())
    assert {"cores", "python", "torch"} <= content["machine"].keys()
    names = [figure["name"] for figure in content["figures"]]
    assert names == NAMES
    for figure in content["figures"]:
        assert len(figure["ours"]) == len(figure["theirs"]) >= TINY.rounds
        assert min(figure["ours"] + figure["theirs"]) > 0
        assert isinstance(figure["met"], bool if figure["target"] else NoneType)
        assert figure["unit"] in ("s", "us", "samples/s", "images/s", "GB/s", "MB", "bytes an added image")
    notes = {figure["name"]: figure["note"] for figure in content["figures"]}
    assert notes["mnist, input"] == "2,000 random images"
    assert notes["cifar, input"] == "2,000 images, random images"
    assert notes["images, packed raw"] == "20 made JPEGs of 500x375"


@pytest.mark.long
def test_a_long_one_runs_when_it_is_named_and_trains_both_sides(
    tmp_path: Path, measured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmarks.main([str(tmp_path), "only=cifar_training"], TINY) == 0
    content = json.loads((tmp_path / "benchmarks.json").read_text())
    figures = {figure["name"]: figure for figure in content["figures"]}
    assert list(figures) == [f"cifar training, {name}" for name in ("time", "wrong test images", "whole wall time")]
    for side in ("ours", "theirs"):
        train_s, wall_s = (figures[f"cifar training, {name}"][side][0] for name in ("time", "whole wall time"))
        assert 0 < train_s < wall_s
        assert 0 <= figures["cifar training, wrong test images"][side][0] <= 100
    assert "20 training and 20 test images, random images" in figures["cifar training, time"]["note"]
    out = capsys.readouterr().out
    assert "seed 0, plain_cifar: " in out
    assert "left out" not in out


def test_the_long_one_does_not_run_unnamed_and_says_how(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(benchmarks.benchmarks()) - set(benchmarks.chosen([])) == {"cifar_training"}
    out = capsys.readouterr().out
    assert "left out" in out
    assert out.endswith("make bench ONLY=cifar_training\n")
    assert list(benchmarks.chosen(["step", "cifar_training"])) == ["step", "cifar_training"]


@pytest.mark.parametrize(("words", "line"), [
    (["only=cifar_trainin"], "did you mean 'cifar_training'?"),
    (["only=login,x"], "only=x: wants some of "),
])  # fmt: skip
def test_a_benchmark_that_is_not_there_is_one_line(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmarks.main(words, TINY) == 2
    err = capsys.readouterr().err
    assert line in err
    assert err.count("\n") == 1


def test_the_real_one_wants_real_images(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(inputs, "CIFAR_JPEGS", tmp_path / "none")
    monkeypatch.setattr(inputs, "DATA", tmp_path)
    with pytest.raises(InputError, match=r"wants the real CIFAR-10: python -m recipes\.prepare cifar10"):
        bench_cifar_training.figures(FULL)


def test_ratios_are_of_medians_of_means_or_of_pairs() -> None:
    ours, theirs = [1.0, 2.0, 6.0], [2.0, 8.0, 5.0]
    found = {of: Figure("n", "s", "us", "them", "", ours, theirs, ratio_of=of) for of in ("medians", "means", "pairs")}
    assert {of: round(figure.ratio, 3) for of, figure in found.items()} == {"medians": 0.4, "means": 0.6, "pairs": 0.5}
    assert found["means"].met is None
    assert str(found["means"]).endswith("ratio 0.6, no target")


def test_a_figure_is_the_ratio_of_medians_held_against_its_target() -> None:
    slow = Figure("n", "s", "us", "them", "<= 0.20", [0.3, 9.0, 0.2], [1.0, 1.0, 2.0])
    assert slow.ratio == pytest.approx(0.3)
    assert not slow.met
    assert str(slow) == "n: us 0.3 s (0.2 to 9), them 1 s (1 to 2), ratio 0.3, target <= 0.20, MISSED"
    fast = Figure("n", "samples/s", "us", "them", ">= 12", [24000.0], [2000.0], "random images")
    assert fast.met
    assert str(fast).endswith("24,000 samples/s (24,000 to 24,000), them 2,000 samples/s (2,000 to 2,000), ratio 12, "
                              "target >= 12, met  [random images]")  # fmt: skip


def test_sides_take_turns_and_the_first_round_does_not_count() -> None:
    order: list[str] = []

    def side(name: str) -> float:
        order.append(name)
        return float(len(order))

    values = interleaved(3, {"a": lambda: side("a"), "b": lambda: side("b")})
    assert "".join(order) == "baabbaab"
    assert values == {"a": [3.0, 6.0, 7.0], "b": [4.0, 5.0, 8.0]}


def test_a_command_that_ends_otherwise_is_not_measured() -> None:
    with pytest.raises(RuntimeError, match="status 2, not 0"):
        bench_login.wall_s(bench_login.MISSPELT)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert benchmarks.main([str(tmp_path / "file")], TINY) == 2
    assert capsys.readouterr().err.count("\n") == 1
