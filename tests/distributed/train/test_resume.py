"""Which checkpoints a run keeps, and which one it resumes from if a checkpoint is named, the job is
requeued, or an older one is chosen.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from recipes.core import files
from recipes.core.run import attempt as attempts
from recipes.core.run import directory
from recipes.core.train import checkpoint
from tests import helpers

ONE_RANK = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "PYTHONPATH": str(helpers.ROOT),
}


def test_a_run_resumed_from_an_older_checkpoint_continues_from_there(tmp_path: Path) -> None:
    """Also where it ends before its next checkpoint; and a checkpoint that was asked for stays the
    one, except for a job that was queued again and has trained this run already.
    """
    argv = [
        sys.executable,
        "-m",
        "recipes.mnist",
        "device=cpu",
        "dataset=digits",
        "cpu_threads=1",
        "run_dir=run",
    ]
    argv += [
        "global_batch_size=64",
        "checkpoint_every_steps=2",
        "keep_checkpoints=0",
        "network=ethernet",
        "force=true",
    ]
    folder = tmp_path / "run/checkpoints"
    again = {"TORCHELASTIC_RESTART_COUNT": "1"}

    def resumed(*words: str, **environ: str) -> int:
        place = helpers.clean_environment(**ONE_RANK, **environ)
        ended = helpers.run_fork([*argv, *words], cwd=tmp_path, environ=place).expect(0)
        [line] = [line for line in ended.lines if line.startswith("resumed from ")]
        assert line.startswith(f"resumed from {folder}/step-"), line
        return int(line.rpartition(" ")[2])

    environ = helpers.clean_environment(**ONE_RANK)
    helpers.run_fork([*argv, "max_steps=6"], cwd=tmp_path, environ=environ).expect(0)
    best = checkpoint.read(folder / "step-00000006.pt")["meta"]["best"]
    assert best["step"] == 6
    back = [f"resume=run/checkpoints/step-{step:08d}.pt" for step in (2, 4)]
    assert resumed(back[0], "evaluate=true", **again) == 2
    assert checkpoint.named(folder, "latest") == "step-00000006.pt"
    assert resumed(back[1], "max_steps=4") == 4
    assert checkpoint.named(folder, "latest") == "step-00000004.pt"
    assert resumed(back[0], "max_steps=5", **again) == 4  # the same job, which has begun at 4

    def change(name: str, **facts: object) -> None:
        """Changes what the newest attempt has left."""
        newest = attempts.newest(tmp_path / "run")
        assert newest
        files.write_json(
            newest.folder / f"{name}.json", {**helpers.read(newest.folder, name), **facts}
        )

    change("opened", job="5")
    assert resumed(back[0], "max_steps=2", **again) == 2  # another one's
    assert helpers.read(tmp_path / "run", "status")["step"] == 2
    change("begun", own=False)
    assert resumed(back[1], "max_steps=4", **again) == 4  # it had begun, and saved nothing


RUN = (
    "dataset=digits",
    "global_batch_size=512",
    "lr=0.002",
    "device=cpu",
    "cpu_threads=1",
    "log_every_steps=1",
)


def mnist(run_dir: Path, *words: str, recipe: str = "mnist") -> helpers.Ended:
    argv = [sys.executable, "-m", f"recipes.{recipe}", f"run_dir={run_dir}", *words]
    return helpers.run_fork(argv, cwd=run_dir.parent, environ=helpers.clean_environment(**ONE_RANK))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 epochs of 3 steps, all of whose checkpoints of every 5 steps stay."""
    run_dir = tmp_path_factory.mktemp("runs") / "finished"
    mnist(run_dir, *RUN, "epochs=4", "checkpoint_every_steps=5", "keep_checkpoints=0").expect(0)
    return run_dir


@pytest.fixture
def stopped(finished: Path, tmp_path: Path) -> Path:
    """The same run, stopped at step 5."""
    run_dir = shutil.copytree(finished, tmp_path / "stopped")
    for step in (10, 12):
        (run_dir / f"checkpoints/step-{step:08d}.pt").unlink()
    (run_dir / "checkpoints/latest").write_text("step-00000005.pt\n")
    (run_dir / "checkpoints/best").unlink()
    directory.write_status(run_dir, "preempted", attempt=0, step=5, reason="SIGTERM")
    kept = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)[:5]
    (run_dir / "metrics.jsonl").write_text("".join(kept))
    return run_dir


def test_omitted_keys_come_from_the_run(finished: Path, stopped: Path) -> None:
    ended = mnist(stopped).expect(0)
    [line] = [line for line in ended.lines if line.startswith("keys from the resumed run: ")]
    told = set(line.removeprefix("keys from the resumed run: ").split(", "))
    assert {
        "dataset=digits",
        "lr=0.002",
        "device=cpu",
        "cpu_threads=1",
        "keep_checkpoints=0",
    } <= told, line
    whole, again = (helpers.rows(folder) for folder in (finished, stopped))
    assert [row["step"] for row in again] == list(range(1, 13))
    assert [(row["loss"], row["lr"]) for row in again] == [
        (row["loss"], row["lr"]) for row in whole
    ]
    assert (stopped / "config.yaml").read_text() == (finished / "config.yaml").read_text()


def test_force_changes_the_length_and_a_finished_run_may_grow(
    finished: Path, stopped: Path, tmp_path: Path
) -> None:
    ended = mnist(stopped, "epochs=6", "force=true", "cpu_threads=2").expect(0)
    assert "results will not be bitwise identical (cpu_threads=1 becomes 2)" in ended.out
    assert helpers.read(stopped, "summary")["steps"] == 18
    assert "epochs: 6" in (stopped / "config.yaml").read_text()
    longer = shutil.copytree(finished, tmp_path / "longer")
    mnist(longer, "epochs=5").expect(0)
    assert helpers.read(longer, "summary")["steps"] == 15
    summary = helpers.read(longer, "summary")
    ended = mnist(longer).expect(0)
    assert "already finished: step 15 of 15" in ended.out
    assert helpers.read(longer, "summary") == summary
    assert mnist(longer, "epochs=4").status == 2


def test_without_its_runs_config_a_checkpoint_of_another_length_requires_force(
    stopped: Path, tmp_path: Path
) -> None:
    alone = shutil.copy(stopped / "checkpoints/step-00000005.pt", tmp_path / "one_rank.pt")
    mnist(tmp_path / "new", *RUN, f"resume={alone}").expect(0)  # the default happens to be the same
    ended = mnist(tmp_path / "other", *RUN, f"resume={alone}", "epochs=9").expect(2)
    assert (
        "one_rank.pt: was saved with other keys or data (epochs=4 becomes 9): use its values"
        in ended.out
    )
    ended = mnist(
        tmp_path / "other", *RUN, f"resume={stopped}/checkpoints/step-00000005.pt"
    ).expect(0)
    # typed
    assert "dataset=digits" not in ended.out.partition("from the run")[2].partition("\n")[0]


def test_another_validation_set_is_refused(stopped: Path) -> None:
    path = stopped / "checkpoints/step-00000005.pt"
    content = checkpoint.read(path)
    assert content["sampler"]["validation_data"] not in ("", content["sampler"]["data"])
    content["sampler"]["validation_data"] = "another"
    checkpoint.write(path.parent, content)
    assert (
        "was saved with other keys or data (another validation set): use its values"
        in mnist(stopped).expect(2).out
    )
    del content["sampler"]["validation_data"]  # as earlier versions
    checkpoint.write(path.parent, content)
    mnist(stopped).expect(0)


def test_best_latest_and_a_run_directory_name_a_checkpoint(
    finished: Path, stopped: Path, tmp_path: Path
) -> None:
    ended = mnist(stopped, "resume=best").expect(2)
    assert f"resume=best: {stopped}/checkpoints/best does not exist: leave resume= out" in ended.out
    run_dir = shutil.copytree(finished, tmp_path / "run")
    (run_dir / "checkpoints/best").write_text("step-00000010.pt\n")
    ended = mnist(run_dir, "resume=best").expect(0)
    assert f"resumed from {run_dir}/checkpoints/step-00000010.pt, step 10" in ended.lines
    assert (
        ended.lines[-1]
        == f"finished at step 12; val_top1 {helpers.read(run_dir, 'summary')['val_top1']:.4f}"
    )
    ended = mnist(run_dir, "resume=latest", "evaluate=true")
    assert f"resumed from {run_dir}/checkpoints/step-00000012.pt, step 12" in ended.lines
    assert ended.lines[-1].startswith("evaluated step 12; val_top1 ")
    ended = mnist(tmp_path / "new", f"resume={stopped}/checkpoints", "evaluate=true")
    assert f"resumed from {stopped}/checkpoints/step-00000005.pt, step 5" in ended.lines
    ended = mnist(tmp_path / "new", *RUN, f"resume={tmp_path}").expect(2)
    assert (
        f"resume={tmp_path}: there is no checkpoint in that folder: give a run directory "
        "that has one"
    ) in ended.out


@pytest.mark.long
def test_a_resume_names_the_code_that_has_changed(tmp_path: Path) -> None:
    """Each attempt keeps its difference from the commit."""
    repo = tmp_path / "repo"
    shutil.copytree(
        helpers.ROOT / "recipes", repo / "recipes", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copytree(helpers.ROOT / "env", repo / "env")
    keys = ["device=cpu", "cpu_threads=1", f"run_dir={tmp_path}/run", "max_steps=2"]
    argv = [sys.executable, "-m", "recipes.toy", *keys]

    def run(*words: str) -> str:
        return helpers.run(
            [*argv, *words], cwd=repo, environ=helpers.clean_environment(PYTHONPATH=str(repo))
        ).out

    assert "code has changed" not in run()
    assert "code has changed" not in run("max_steps=3", "force=true")
    (repo / "recipes/toy.py").write_text((repo / "recipes/toy.py").read_text() + "# other\n")
    (repo / "recipes/core/launch/cli.py").write_text("# of no rank\n")
    changed = "warning: the code has changed since this checkpoint was saved: recipes/toy.py\n"
    assert changed in run("max_steps=4", "force=true")
