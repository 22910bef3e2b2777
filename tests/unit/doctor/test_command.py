"""The doctor's commands on one machine: the examination, env files, and invalid arguments."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests import helpers


def doctor(*words: str, **environ: str) -> helpers.Ended:
    return helpers.run(
        [sys.executable, "-m", "recipes.doctor", *words],
        environ=helpers.clean_environment(**environ),
    )


def test_the_verdict_of_one_machine(tmp_path: Path) -> None:
    (tmp_path / "my.env").write_text("NCCL_ALGO=Rings\n")
    words = (f"run_dir={tmp_path}", f"network={tmp_path}/my.env", "umask=027")
    ended = doctor("--json", "device=cpu", *words, f"data_dir={tmp_path}/none").expect(3)
    assert (tmp_path / "doctor.json").stat().st_mode & 0o777 == 0o640
    verdict = helpers.read(tmp_path, "doctor")
    assert verdict["healthy"] is False
    assert json.loads(ended.lines[-1]) == {**verdict, "exit_status": 3}
    assert [entry["what"] for entry in verdict["entries"] if entry["bad"]] == [
        f"data_dir={tmp_path}/none cannot be used (No such file or directory)",
        "NCCL_ALGO: Rings must be one of Tree, Ring, CollNetDirect, CollNetChain, CollNet, NVLS, "
        "NVLSTree, PAT",
    ]
    assert verdict["exclude"] == []  # it may have been typed wrongly


def test_json_tells_why_a_command_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for words, status in (("seconds=-1",), 2), (("device=cpu", f"run_dir={tmp_path}/file/x"), 3):
        results, line = doctor("--json", *words).expect(status).lines
        assert json.loads(results) == {
            "error": line.removeprefix("doctor: "),
            "exit_status": status,
        }


def test_a_shell_judges_the_reports(tmp_path: Path) -> None:
    data = {"HOME": str(tmp_path.parent), "RECIPES_DATA": f"~/{tmp_path.name}/none"}
    ended = doctor("report", "device=cpu", f"run_dir={tmp_path}", **data).expect(0)
    assert ended.out == ""
    assert [path.name for path in (tmp_path / "reports").iterdir()] == ["0.json"]
    batch = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_PROCID": "0",
    }
    ended = doctor("judge", f"run_dir={tmp_path}", **batch).expect(3)
    assert f"BAD   n1: data_dir={tmp_path}/none cannot be used" in ended.out
    assert "BAD   n2: did not answer: it hangs" in ended.out
    assert helpers.read(tmp_path, "doctor")["healthy"] is False
    assert [path.name for path in tmp_path.iterdir()] == ["doctor.json"]  # no status of a run
    ended = doctor("judge", f"run_dir={tmp_path}").expect(3)
    assert ended.lines == [f"doctor: no node has written a report into {tmp_path}/reports"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_doctor_at_once_and_leaves_no_process(
    tmp_path: Path, number: signal.Signals
) -> None:
    environ = helpers.clean_environment()
    command = [sys.executable, "-m", "recipes.doctor", f"run_dir={tmp_path}/run"]
    # whoever started the tests may ignore it
    usual = partial(signal.signal, number, signal.SIG_DFL)
    with subprocess.Popen(command, cwd=helpers.ROOT, env=environ, preexec_fn=usual) as process:
        tasks = Path(f"/proc/{process.pid}/task")

        def commands() -> list[int]:
            return [
                int(child)
                for path in tasks.glob("*/children")
                for child in path.read_text().split()
            ]

        helpers.wait_until(commands, 60, "its commands")
        running = commands()
        process.send_signal(number)
        assert process.wait(helpers.START_S) == 128 + number
    helpers.wait_for_the_end_of(running, helpers.START_S)


def test_a_doctor_that_hangs_ends_after_its_limit() -> None:
    hang = (
        "import recipes.doctor as d; d.OVER_S = -120; d.examine.run = lambda *_, **__: "
        "d.threading.Event().wait(9)"
    )
    ended = helpers.run(
        [sys.executable, "-c", f"{hang}; d.main([], dict())"], environ=helpers.clean_environment()
    ).expect(3)
    assert "the examination exceeded seconds= and was stopped" in ended.out


@pytest.mark.parametrize(
    ("words", "status", "expected"),
    [
        (("explain",), 2, "doctor: explain: a path is missing"),
        (("explain", "LICENSE", "/none/such"), 2, "doctor: /none/such: No such file or directory"),
        (("explain", "1234_2"), 2, "give a run directory, a job ID, last, or a log"),
        (("look",), 2, "doctor: 'look' is not key=value"),
        (("nodes=3",), 2, "nodes=3: is a job key"),
        (("seconds=19",), 2, "seconds=19.0: must be at least 20"),
        (("run_dir=/proc/none",), 3, "give another run_dir="),
    ],
)
def test_an_invalid_command_line_is_reported_in_one_line(
    words: tuple[str, ...], status: int, expected: str
) -> None:
    ended = doctor(*words).expect(status)
    assert len(ended.lines) == 1, ended.out
    assert expected in ended.out


def test_each_command_has_a_help() -> None:
    for command in ((), ("explain",)):
        assert "finds bad nodes" in doctor(*command, "--help").expect(0).out
