"""The log of a rank: what it prints goes to the terminal and to its file."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.core.errors import MachineError
from recipes.core.run import logs
from tests import helpers
from tests.helpers import ROOT, clean_environment


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env=clean_environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=60,
    )


COPIED = """
import os, signal, subprocess, sys
from pathlib import Path
from recipes.core.run import logs
how, path = sys.argv[1:]
print("before")
with logs.copied_to(Path(path)) as terminal:
    assert terminal is None
    print("from Python")
    print("to stderr", file=sys.stderr)
    os.write(1, b"from below Python\\n")
    subprocess.run(["sh", "-c", "echo from a child; echo its stderr >&2"])
    if how == "signals":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, lambda *_: None)
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        assert len(children) == 2
        for child in children:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
                os.kill(int(child), number)
        print("after the signals")
    if how == "killed":
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
print("after")
"""


@pytest.mark.parametrize("how", ["ended", "signals", "killed"])
def test_output_goes_to_the_log_and_to_the_terminal(tmp_path: Path, how: str) -> None:
    log = tmp_path / "rank0.log"
    log.write_text("from the attempt before\n")
    ended = python(COPIED, how, str(log))
    inside = ["from Python", "from below Python", "from a child"]
    inside += {"ended": [], "signals": ["after the signals"], "killed": ["last words"]}[how]
    after = [] if how == "killed" else ["after"]
    assert ended.returncode == (-signal.SIGKILL if how == "killed" else 0), ended.stderr
    assert ended.stdout.splitlines() == ["before", *inside, *after]
    assert ended.stderr.splitlines() == ["to stderr", "its stderr"]
    before, _, now = log.read_text().partition("\f\n")
    assert before == "from the attempt before\n"
    assert sorted(now.splitlines()) == sorted([*inside, "to stderr", "its stderr"])


UNREAD = """
import sys
from pathlib import Path
from recipes.core.run import logs
with logs.copied_to(Path(sys.argv[1])):
    for number in range(4):
        sys.stdin.readline()
        print("line", number)
"""


def test_the_log_continues_after_stdout_is_closed(tmp_path: Path) -> None:
    """Ctrl-C ends the user's ``tee`` just when the run has to save."""
    command = [sys.executable, "-c", UNREAD, str(tmp_path / "log")]
    log = tmp_path / "log"
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        for number in range(4):
            process.stdin.write("on\n")
            process.stdin.flush()
            assert process.stdout.closed or process.stdout.readline() == "line 0\n"
            process.stdout.close()
            line = f"line {number}\n"
            helpers.wait_until(lambda line=line: line in log.read_text(), 10, line)
        assert process.wait(10) == 0


IN_ONE_WRITE = """
import os, sys
from pathlib import Path
from recipes.core.run import logs
with logs.copied_to(Path(sys.argv[1])):
    # keeps what is written apart: one read gives one write
    read_end, write_end = os.pipe2(os.O_DIRECT)
    os.dup2(write_end, 1)
    print("line", 1)
    print("line", 2)
    sys.exit(os.read(read_end, 100) != b"line 1\\n")
"""


def test_each_line_is_one_write(tmp_path: Path) -> None:
    helpers.run([sys.executable, "-u", "-c", IN_ONE_WRITE, str(tmp_path / "log")]).expect(0)


def test_a_log_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(MachineError, match=rf"^run_dir={tmp_path}: .*: give"),
        logs.copied_to(tmp_path / "none/log"),
    ):
        pass
