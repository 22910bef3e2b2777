"""launch.py scale: jobs of several sizes, the table of their runs, and the prediction for other
sizes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.core import files
from recipes.core.errors import ConfigError, InputError
from recipes.core.launch import scale
from recipes.core.launch.scale import Link, Measured
from recipes.core.run import directory


def run(folder: Path, ranks: int, speed: float, **changed: Any) -> Path:
    summary = {
        "recipe": "toy",
        "world_size": ranks,
        "num_nodes": (ranks + 1) // 2,
        "samples_per_second": speed,
        "device": "cpu",
    }
    summary |= {"parameters": 1_000_000, "global_batch_size": 100}
    summary |= {"busbw": {"all_reduce": 2.0}, "latency_us": {"all_reduce": 60.0}}
    folder.mkdir()
    directory.write_status(folder, "done", attempt=0, step=2)
    (folder / "job.yaml").write_text("{}")
    (folder / "summary.json").write_text(json.dumps({**summary, **changed}))
    row = {"attempt": 0, "rank_step_s": [0.5, 0.3], "forward_backward": 0.75}
    with open(folder / "metrics.jsonl", "w") as file:
        for step, share in ((1, 0.1), (2, 1.0)):  # the first row has the start in it
            of_row = {**row, "step": step, "samples_per_second": share * speed}
            print(json.dumps(of_row), file=file)
    return folder


def submitted(words: list[str], tmp_path: Path) -> list[list[str]]:
    submissions = list[list[str]]()

    def submit(words: list[str], told: files.Json) -> int:
        submissions.append(words)
        told["runs"] = [words[-1]]
        return 0

    told = files.Json()
    assert scale.scale(words, tmp_path, submit, told) == 0
    assert told.get("runs", []) == [words[-1] for words in submissions]
    return submissions


def test_a_job_for_each_size_with_the_same_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = submitted(["recipe=toy", "nodes=4,1,2,1", "max_steps=9"], tmp_path)
    assert [job[:-1] for job in jobs] == [
        ["recipe=toy", "max_steps=9", f"nodes={n}"] for n in (1, 2, 4)
    ]
    assert [Path(job[-1].removeprefix("run_dir=")).name for job in jobs] == [
        "nodes-1",
        "nodes-2",
        "nodes-4",
    ]
    assert f"python launch.py scale {tmp_path}/runs/scale/" in capsys.readouterr().out
    submitted(["recipe=toy", "nodes=1"], tmp_path / "my clone")
    assert f"python launch.py scale '{tmp_path}/my clone/runs/" in capsys.readouterr().out
    weak = submitted(["recipe=toy", "nodes=2,4", "weak=true", "global_batch_size=64"], tmp_path)
    assert ["global_batch_size=64" in job for job in weak] == [True, False]
    assert "global_batch_size=128" in weak[1]


def test_a_size_that_slurm_refuses_ends_the_command(tmp_path: Path) -> None:
    statuses = iter((0, 3))
    words = ["recipe=toy", "nodes=1,2,4"]
    assert scale.scale(words, tmp_path, lambda *words: next(statuses), {}) == 3


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "give recipe=NAME nodes=1,2,4"),
        (["recipe=toy", "runs"], "give recipe=NAME nodes=1,2,4"),
        (["recipe=toy", "nodes=1,x"], "nodes='1,x'|nodes=1,x: must be numbers"),
        (["recipe=toy", "nodes=1", "run_dir=x"], "run_dir= is chosen"),
        (["recipe=toy", "nodes=1", "launcher=local"], "launcher=local is not supported"),
        (["recipe=toy", "nodes=1", "weak=1"], "weak=1: must be true or false"),
        (["runs", "weak=true"], "weak= with a run is for a prediction: give link= and ranks="),
        (["runs", "more", "link=x", "ranks=4"], "link= predicts from one run: give one run"),
        (["recipe=collectives", "nodes=1,2"], "give a recipe that trains"),
        (["runs", "ranks=4"], "ranks=: with a run, only link= and ranks="),
    ],
)
def test_invalid_words_are_refused(words: list[str], error: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=error):
        submitted(words, tmp_path)


def test_the_table_of_runs_and_a_prediction_from_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = run(tmp_path / "two", 2, 100.0, num_nodes=4)
    six = run(tmp_path / "six", 6, 150.0)
    assert submitted([str(six), str(two)], tmp_path) == []
    _, first, second = capsys.readouterr().out.splitlines()
    assert first.split() == ["2", "4", "100", "1000", "100.0", "100%"]
    assert second.split() == ["6", "3", "100", "666.7", "150.0", "50%"]
    # Each of two ranks works 0.4 s for 100 samples; the ring takes 6 x 6 us + 1.5 x 4 MB / 2 GB/s
    # on four ranks.
    assert submitted([str(two), f"link={six}", "ranks=4,1"], tmp_path) == []
    _, _, first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.split() == ["1", "800", "125.0", "100%", "0%"]
    assert second.split() == ["4", "203", "492.5", "99%", "1%"]
    assert submitted([str(two), f"link={six}", "ranks=4", "weak=true"], tmp_path) == []
    _, _, line, *_ = capsys.readouterr().out.splitlines()
    assert line.split() == ["4", "403", "496.2", "99%", "1%"]


def test_two_thirds_of_forward_and_backward_hide_communication_on_a_gpu(tmp_path: Path) -> None:
    assert scale.read(run(tmp_path / "cpu", 6, 150.0)).backward_s == 0.0
    base = scale.read(run(tmp_path / "gpu", 6, 150.0, device="cuda"))
    assert base.backward_s == pytest.approx(0.5 * 100 / 150)


def test_a_run_that_lacks_figures_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give a run with strategy=ddp"):
        scale.read(run(tmp_path / "c", 2, 100.0, strategy="fsdp"))
    with pytest.raises(InputError, match="not a finished training"):
        scale.read(run(tmp_path / "a", 1, 100.0, parameters=None))
    with pytest.raises(
        InputError,
        match="has no measured bandwidth and latency of all_reduce: run recipe=collectives",
    ):
        scale.read_link(run(tmp_path / "b", 2, 100.0, busbw={}))


def test_backward_pass_hides_the_ring_on_a_gpu() -> None:
    # 8 GPUs of a node, 256 samples each in 0.64 s, ResNet-50's gradients
    base = Measured(Path(), "imagenet", 8, 1, 2048.0, 3200.0, 0.64, 0.4, gradient_bytes=102e6)
    slow = Link(5e-6, 0.2e9)  # a ring of 0.9 s
    for weak, hidden_s in ((True, 0.4), (False, 0.2)):
        _, waiting_s = scale.predicted(base, slow, 16, weak)
        assert waiting_s == pytest.approx(slow.all_reduce_s(102e6, 16) - hidden_s)
    assert scale.predicted(base, Link(5e-6, 10e9), 16, weak=True) == (0.64, 0.0)
