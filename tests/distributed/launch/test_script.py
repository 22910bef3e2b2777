"""``script=FILE``: a program of the user as ranks of this machine. What it gets, how it ends, and
what is recorded.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes import script
from recipes.core.errors import Kind
from recipes.core.launch import cli
from recipes.core.place.ranks import RankInfo
from tests import helpers
from tests.helpers import LOCAL, ROOT

HOST = socket.gethostname()
DDP = """
import json, os, sys, beside
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([10.0 ** dist.get_rank()])
dist.all_reduce(total)
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK MASTER_ADDR"
place = [os.environ[name] for name in names.split()]
facts = {"sum": total.item(), "argv": sys.argv[1:], "cwd": os.getcwd(), "place": place}
open(os.environ["RECIPES_RUN_DIR"] + f"/rank{dist.get_rank()}.json", "w").write(json.dumps(facts))
assert os.environ["GLOO_SOCKET_IFNAME"] == "lo" and "RECIPES_ATTEMPT" not in os.environ
dist.destroy_process_group()
"""
# Notes each signal that it receives. It saves, and ends with the status that is typed.
HANDLER = """
import os, pathlib, signal, sys, time
notes = pathlib.Path(os.environ["RECIPES_RUN_DIR"], "notes" + os.environ["RANK"])
got = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: (got.append(number), notes.write_text(f"{got}")))
notes.write_text("ready")
while not got:
    time.sleep(0.02)
time.sleep(1)
sys.exit(int(sys.argv[1]))
"""


def start(
    folder: Path, program: str, *args: str, name: str = "a.py", ranks: int = 1
) -> subprocess.Popen[str]:
    """Starts a program on this machine, with ``folder`` as working folder and ``folder``/run as run
    directory.
    """
    (folder / name).write_text(program)
    (folder / name).chmod(0o755)
    words = [f"script={name}", *LOCAL[3:5], f"ranks_per_node={ranks}", "run_dir=run", "--", *args]
    return helpers.start([*LOCAL[:2], *words], cwd=folder)


def status(folder: Path, *names: str) -> list[object]:
    return [helpers.read(folder / "run", "status")[name] for name in names]


def explained(folder: Path) -> list[str]:
    return helpers.run([sys.executable, "-m", "recipes.doctor", "explain", f"{folder}/run"]).lines


def test_a_ddp_program_gets_its_place_its_arguments_and_its_modules(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("")
    helpers.finish(start(tmp_path, DDP, "--lr", "0.1", "a b", "$HOME", ranks=2)).expect(0)
    same = {"sum": 11.0, "argv": ["--lr", "0.1", "a b", "$HOME"], "cwd": str(tmp_path)}
    for rank in range(2):
        place = [str(rank), "2", str(rank), "2", "0", "0", "127.0.0.1"]
        assert helpers.read(tmp_path / "run", f"rank{rank}") == {**same, "place": place}
    assert status(tmp_path, "state", "reason") == ["done", ""]
    assert "script: 2 ranks on 1 node: " in (tmp_path / "run/logs/rank0.log").read_text()
    assert explained(tmp_path) == ["status.json says done: nothing failed"]


def test_one_rank_of_an_executable_may_form_a_group(tmp_path: Path) -> None:
    program = f"""#!/bin/sh
        exec {sys.executable} -c '
import torch.distributed as dist
dist.init_process_group("gloo")
print("world", dist.get_world_size())'"""
    ended = helpers.finish(start(tmp_path, program, name="b.sh"))
    assert ended.status == 0, ended.out
    assert "world 1" in ended.lines, ended.out


@pytest.mark.parametrize(
    ("program", "code", "kind", "error"),
    [
        (
            "raise ValueError('bad data')",
            1,
            "error",
            "the program exited with status 1; ValueError: bad data",
        ),
        ("x = = 1", 1, "error", "the program exited with status 1; SyntaxError: invalid syntax"),
        ("import sys; sys.exit(3)", 3, "error", "the program exited with status 3"),
        (
            "import os; os.kill(os.getpid(), 9)",
            137,
            "killed",
            "the program was killed by signal 9 (Killed; often the memory was used up)",
        ),
        (
            "import sys; sys.exit(130)",
            130,
            "killed",
            "the program exited with status 130, as a shell does after signal 2 (Interrupt)",
        ),
    ],
)
def test_the_rank_that_fails_first_is_named(
    tmp_path: Path, program: str, code: int, kind: str, error: str
) -> None:
    (tmp_path / "fails.py").write_text(program)
    peer = (
        "import runpy, os, time\nif os.environ['RANK'] == '1': runpy.run_path('fails.py')\n"
        "time.sleep(1.5); exit(7)"
    )
    ended = helpers.finish(start(tmp_path, peer, ranks=2))
    reason = f"rank 1 on {HOST} failed first: {error}"
    assert ended.status == code, ended.out
    assert ended.lines[-1] == f"failed: {reason}; logs in {tmp_path}/run/logs"
    recorded = helpers.read(tmp_path / "run", "status")
    assert recorded["state"] == "failed"
    assert recorded["kind"] == kind
    assert recorded["first_failing_rank"] == 1
    assert recorded["exit_status"] == code
    assert explained(tmp_path)[0] == reason


@pytest.mark.parametrize("code", [0, 1])
def test_a_signal_reaches_the_program_once_and_the_run_is_preempted(
    tmp_path: Path, code: int
) -> None:
    launcher = start(tmp_path, HANDLER, str(code), ranks=2)
    notes = [tmp_path / f"run/notes{rank}" for rank in range(2)]
    helpers.wait_until(
        lambda: all(note.exists() for note in notes), helpers.START_S, "the programs"
    )
    launcher.send_signal(signal.SIGUSR1)
    helpers.finish(launcher).expect(75)
    assert [note.read_text() for note in notes] == [str([signal.SIGUSR1.value])] * 2
    assert status(tmp_path, "state", "kind", "reason") == ["preempted", "stopped", "SIGUSR1"]
    assert explained(tmp_path) == [
        "stopped by SIGUSR1; to resume, start the run again with the same run_dir="
    ]


def test_a_signal_to_all_processes_of_a_rank_is_not_passed_on(tmp_path: Path) -> None:
    """As Slurm sends it with ProctrackType=proctrack/linuxproc."""
    launcher = start(tmp_path, HANDLER.replace(", signal.SIGUSR1", ","), "0")
    note = tmp_path / "run/notes0"
    helpers.wait_until(note.exists, helpers.START_S, "the program")
    [rank] = helpers.children(launcher.pid)
    for pid in (rank, *helpers.children(rank)):
        os.kill(pid, signal.SIGTERM)
    assert helpers.finish(launcher).status == 75
    assert note.read_text() == str([signal.SIGTERM.value])


def test_a_program_without_a_handler_is_preempted_and_one_that_exits_with_75_too(
    tmp_path: Path,
) -> None:
    launcher = start(
        tmp_path,
        "import os, time; open(os.environ['RECIPES_RUN_DIR'] + '/up', 'w'); time.sleep(100)",
    )
    helpers.wait_until((tmp_path / "run/up").exists, helpers.START_S, "the program")
    launcher.terminate()
    assert helpers.finish(launcher).status == 75
    assert status(tmp_path, "state", "attempt", "reason") == ["preempted", 0, "SIGTERM"]
    helpers.finish(start(tmp_path, "import sys; sys.exit(75)")).expect(75)
    why = "exit status 75, which asks for a requeue"
    assert status(tmp_path, "state", "attempt", "reason") == ["preempted", 1, why]


def test_the_program_ends_with_its_rank(tmp_path: Path) -> None:
    launcher = start(
        tmp_path, "import os, time; print('pid', os.getpid(), flush=True); time.sleep(100)"
    )
    log = tmp_path / "run/logs/rank0.log"
    pid = helpers.wait_until(
        lambda: log.exists() and re.search(r"^pid (\d+)$", log.read_text(), re.MULTILINE),
        helpers.START_S,
        "the program",
    )
    launcher.kill()
    helpers.wait_for_the_end_of([int(pid[1])], 20)


def test_a_program_that_cannot_be_started_is_bad_input(tmp_path: Path) -> None:
    ended = helpers.finish(start(tmp_path, "#!/no/such/interpreter", name="b.sh")).expect(2)
    line = f"script={tmp_path}/b.sh: cannot be started in {tmp_path} (No such file or directory)"
    assert f"script: {line}" in ended.lines
    assert status(tmp_path, "kind") == ["input"]


def test_a_rank_without_a_parent_is_refused(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "recipes.script", f"script={__file__}", f"run_dir={tmp_path}/run"]
    ended = helpers.run(argv)
    assert ended.status == 2, ended.out
    assert len(ended.lines) == 1, ended.out
    assert (
        "use python launch.py script=FILE, or sbatch sbatch/script_2x8.sh script=FILE" in ended.out
    )
    assert not (tmp_path / "run").exists()


def test_check_does_not_start_the_program(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.py").write_text("import pathlib; pathlib.Path('started').touch()")
    words = [
        "check",
        f"script={tmp_path}/a.py",
        *LOCAL[3:5],
        f"run_dir={tmp_path}/run",
        "--",
        "--help",
    ]
    assert cli.main(words, sys.executable) == 0
    lines = capfd.readouterr().out.splitlines()
    not_checked = f"script: not checked: launch.py check does not start {tmp_path}/a.py"
    assert lines[:2] == ["keys:   ok: script, 1 rank", not_checked]
    assert lines[-1] == "nothing was submitted"
    assert not list(ROOT.glob("started")) + list(tmp_path.glob("started"))


@pytest.mark.parametrize(
    ("returncode", "kind", "status", "words"),
    [
        (-9, Kind.killed, 137, "was killed by signal 9 (Killed; often the memory was used up)"),
        (-15, Kind.killed, 143, "was killed by signal 15 (Terminated)"),
        (139, Kind.killed, 139, "exited with status 139, as a shell does after signal 11"),
        (1, Kind.error, 1, "exited with status 1"),
        (128, Kind.error, 128, "exited with status 128"),
        (255, Kind.error, 255, "exited with status 255"),
    ],
)
def test_how_a_program_ended(returncode: int, kind: Kind, status: int, words: str) -> None:
    assert script.describe(returncode)[:2] == (kind, status)
    assert script.describe(returncode)[2].startswith(words)


def test_the_exception_at_the_end_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    old = "Traceback (most recent call last):\n  File x\nKeyError: old\n\f\n"
    of_torch = (
        '[rank3]: Traceback (most recent call last):\n[rank3]:   File "x", line 1, in f\n'
        "[rank3]: E: a\n[rank3]: more\nend\n"
    )
    texts = {old: "", old + of_torch: "; E: a", of_torch + "Traceback\n": "; E: a", "a\nb\n": ""}
    for text, expected in texts.items():
        log.write_text(text)
        assert script.last_exception(log) == expected


# Waits for a file. The second rank waits in a loader process.
WAITS = """
import os, pathlib, time
from torch.utils.data import DataLoader, Dataset

class Samples(Dataset):
    def __len__(self):
        return 1
    def __getitem__(self, i):
        while not pathlib.Path("go").exists():
            time.sleep(0.02)
        return i

if __name__ == "__main__":
    pathlib.Path("ready" + os.environ["RANK"]).touch()
    if os.environ["RANK"] == "0":
        Samples()[0]
    list(DataLoader(Samples(), num_workers=1))
"""


def look(folder: Path) -> str:
    command = [sys.executable, str(ROOT / "launch.py"), "look", f"{folder}/run"]
    return helpers.run(command).expect(0).out


def test_look_shows_where_a_program_and_its_loader_processes_are(tmp_path: Path) -> None:
    process = start(tmp_path, WAITS, ranks=2)
    worker = f"workers of rank 1 on {HOST}: in __getitem__ at a.py:10\n"
    helpers.wait_until(lambda: (tmp_path / "ready1").exists(), helpers.START_S, "the program")
    helpers.wait_until(lambda: worker in look(tmp_path), 30, worker)
    out = look(tmp_path)
    assert f"rank 0 on {HOST}: in __getitem__ at a.py:10, 0." in out, out
    assert re.search(
        rf"^rank 1 on {HOST}: in \w+ at a\.py:17, \d\.\d CPUs per rank$", out, re.MULTILINE
    ), out
    (tmp_path / "go").touch()
    helpers.finish(process).expect(0)
    assert status(tmp_path, "state") == ["done"]


def test_look_names_a_program_that_is_not_in_python(tmp_path: Path) -> None:
    process = start(tmp_path, "#!/bin/sh\ntouch ready0\nread line < pipe\n", name="a.sh")
    os.mkfifo(tmp_path / "pipe")
    helpers.wait_until(lambda: (tmp_path / "ready0").exists(), helpers.START_S, "the program")
    out = look(tmp_path)
    assert re.search(rf"^rank 0 on {HOST}: no Python stack of /bin/sh \S+/a\.sh \(state S, ", out)
    (tmp_path / "pipe").write_text("line\n")
    helpers.finish(process).expect(0)


def test_the_launcher_of_a_later_node_fails_as_the_first_rank_of_this_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[int] = []
    monkeypatch.setattr(script, "watch_run", lambda *words: None)
    monkeypatch.setattr(script, "rules", lambda *words: None)
    monkeypatch.setattr(script, "is_stopped", lambda *words: False)
    monkeypatch.setattr(script, "last_exception", lambda log: "")
    monkeypatch.setattr(script, "_copied_to", lambda log: contextlib.nullcontext())
    monkeypatch.setattr(script.supervise, "run", lambda *words: SimpleNamespace(returncode=1))
    monkeypatch.setattr(script, "record", lambda *words, **names: failed.append(words[1]))
    info = RankInfo(1, 0, 1, 2, 1, 2, (), "127.0.0.1", 1, False, None, 0)
    start: Any = SimpleNamespace(
        ranks=info, settings=SimpleNamespace(run=SimpleNamespace(cpu_threads=1))
    )
    launch: Any = SimpleNamespace(on_cpu=True, nproc=4, through="torchrun")
    launch.command = lambda *words: ["torchrun"]
    attempt: Any = SimpleNamespace(run_dir=tmp_path)
    assert script.run_launcher(start, attempt, launch, False) == 1
    assert failed == [4]
