"""The benchmarks work, at a size whose figures mean nothing: no time is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.benchmarks import __main__ as benchmarks
from tests.benchmarks import bench_login
from tests.benchmarks.measure import TINY, Figure, interleaved


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


def test_every_figure_is_in_the_json_with_both_sides(measured: Path) -> None:
    content = json.loads((measured / "benchmarks.json").read_text())
    assert {"cores", "python", "torch"} <= content["machine"].keys()
    names = [figure["name"] for figure in content["figures"]]
    assert names == ["login, a right command", "login, a misspelt key", "mnist, input", "mnist, input and step"]
    for figure in content["figures"]:
        assert len(figure["ours"]) == len(figure["theirs"]) >= TINY.rounds
        assert min(figure["ours"] + figure["theirs"]) > 0
        assert isinstance(figure["met"], bool)
        assert figure["unit"] in ("s", "samples/s")
    assert [figure["note"] for figure in content["figures"][2:]] == ["2,000 random images"] * 2


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
