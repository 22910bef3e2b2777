"""Known lines in logs, and files that are not logs. Hosts and addresses are changed."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from recipes.core.doctor import explain as explaining
from recipes.core.doctor.explain import of_logs as explain
from recipes.core.doctor.patterns import PATTERNS, Pattern
from recipes.core.errors import InputError
from tests.helpers import ROOT

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.\n"
DISK = "OSError: [Errno 5] Input/output error\n"


def said(tmp_path: Path, **files: str) -> list[str]:
    """What is found in a folder with these files; ``__`` in a name stands for a dot."""
    for name, text in files.items():
        (tmp_path / name.replace("__", ".")).write_text(text)
    return explain(tmp_path)


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.name)
def test_a_line_with_a_text_of_a_pattern_is_explained(tmp_path: Path, pattern: Pattern) -> None:
    for text in pattern.texts.split(" | "):
        lines = said(tmp_path, job__out=f"epoch 1  step 1\nnode1: x {text} y\nnode2: x {text} y\n")
        named = f"{pattern.level.name}: {pattern.name} (1 file): {pattern.means}"
        assert lines[1:4] == [named, f"  do: {pattern.fix}", f"  job.out: node1: x {text} y"]
        assert lines[4] == "job.out ends:"  # no other pattern


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (
            "NVRM: Xid (PCI:0000:06:00): 79, pid=1234, GPU has fallen off the bus.",
            "GPU hardware failed",
        ),
        (
            "error: *** JOB 1 ON n17 CANCELLED AT 2020-07-11T22:48:26 DUE TO TIME LIMIT ***",
            "time limit or preemption",
        ),
        (
            "RuntimeError: DataLoader worker (pid 46794) is killed by signal: Killed.",
            "memory is used up",
        ),
        (
            "ImportError: libtorch_cuda.so: failed to map segment from shared object",
            "address space is limited",
        ),
    ],
)
def test_a_line_with_several_texts_has_one_cause(tmp_path: Path, line: str, name: str) -> None:
    (tmp_path / "a.log").write_text(line)
    [pattern] = explaining.read_log(tmp_path / "a.log", "a.log").known
    assert pattern.name == name


def test_no_pattern_matches_what_this_project_prints(tmp_path: Path) -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    blocks = [block for page in pages for block in page.read_text().split("```")[1::2]]
    assert len(blocks) > 40
    ordinary = """
        mnist: 4 ranks on 2 nodes, cpu, gloo
        epoch 10  step 230  loss 0.5416  lr 1.6e-07  1,831 samples/s  val_top1 0.9944 \
 val_top5 1.0000
        mnist: failed: rank 1 on node1 exited without an error record (killed, out of memory, \
or its node is gone); logs in /r/logs
        rank 1 on node1 stayed at step 9 (backward), and the other ranks timed out \
waiting for it
        failed: rank 1 on node1 was killed by signal 9; logs in /r/logs
        node0:13571:13571 [0] NCCL INFO Bootstrap : Using enp10s0:10.10.7.107<0>
        [W socket.cpp:601] [c10d] The client socket has failed to connect to [node1]:29500 \
(errno: 111 - Connection refused).
        45%|####5     | 2321/5005 [12:33<14:12,  3.15it/s, loss=2.61]
    """
    assert said(tmp_path, job__out="\n".join([*blocks, ordinary]))[0] == "no known cause in 1 file"


def test_a_cause_comes_before_its_consequences(tmp_path: Path) -> None:
    closed = "[rank0]: RuntimeError: [pair.cc:534] Connection closed by peer [10.0.0.8]:22676\n"
    memory = "".join(f"step {step}\n" for step in range(9)) + OOM
    lines = said(tmp_path, rank0__log=closed, rank2__log=memory)
    assert lines[0] == "most likely cause in the logs: CUDA out of memory"
    assert lines[1].startswith("cause: CUDA out of memory (1 file): the GPU has")
    assert lines[3] == f"  rank2.log: {OOM.strip()}"
    assert lines[4].startswith("consequence: lost another rank (1 file): ")
    assert lines[7:] == [
        "rank2.log ends:",
        *(f"  | step {step}" for step in range(4, 9)),
        f"  | {OOM.strip()}",
    ]


def test_of_many_causes_three_are_explained(tmp_path: Path) -> None:
    lines = said(tmp_path, a__log=f"{OOM}{DISK}Segmentation fault\nEADDRINUSE\n")
    assert sum(line.startswith("  do: ") for line in lines) == 3


def test_only_the_newest_attempt_in_a_log_counts(tmp_path: Path) -> None:
    lines = said(tmp_path, rank0__log=f"\fstep 1\n{OOM}\fstep 7\n{DISK}")
    assert lines[0] == "most likely cause in the logs: file system failed"
    assert f"  rank0.log: {DISK.strip()}" in lines
    assert "CUDA" not in "\n".join(lines)
    lines = said(tmp_path, rank0__log=f"{OOM}\fstep 7\n")
    assert lines == ["no known cause in 1 file", "rank0.log ends:", "  | step 7"]


def test_a_progress_bar_does_not_hide_the_text_after_it(tmp_path: Path) -> None:
    bar = "".join(f"\r{n}%|####    | {n}/100" for n in range(100))
    assert f"  job.out: {DISK.strip()}" in said(tmp_path, job__out=f"a\n{bar}\r{DISK}")


@pytest.mark.parametrize(
    "make", [lambda p: None, lambda p: p.mkdir(), lambda p: os.mkfifo(p), lambda p: p.symlink_to(p)]
)
def test_a_path_without_logs_is_one_line(tmp_path: Path, make: Callable[[Path], object]) -> None:
    path = tmp_path / "x\x1b[31m\n"
    make(path)
    with pytest.raises(InputError) as error:
        explain(path)
    assert str(error.value).isprintable()


def test_pipes_circular_links_and_unreadable_files_are_skipped(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.log")
    (tmp_path / "round.log").symlink_to("round.log")
    (tmp_path / "again").symlink_to(tmp_path)
    (tmp_path / "zero.log").symlink_to("/dev/zero")
    lines = said(tmp_path, a__txt=DISK)
    assert lines[0] == "most likely cause in the logs: file system failed"
    assert lines[-2:] == ["a.txt ends:", f"  | {DISK.strip()}"]


def test_binary_content_is_escaped_and_colours_hide_nothing(tmp_path: Path) -> None:
    line = b"\n\x1b[31mCUDA \x1b[1mout of\x1b[0m memory \xff\x00\x1b]0;title\x07 \xe2\x80\xae end\n"
    (tmp_path / "a\x1b[2J\n.log").write_bytes(bytes(range(256)) * 4000 + line)
    lines = explain(tmp_path)
    assert "CUDA out of memory" in lines[0]
    assert all(line.isprintable() for line in lines)
    assert "\\x1b]0;title\\x07 \\u202e end" in lines[3]


@pytest.mark.parametrize(
    "content", ["Killed", "[rank1", "\x1b[", "Traceback (most recent call last)\n"]
)
def test_ten_megabytes_of_anything_take_little_time(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.log").write_text(content * (10_000_000 // len(content)))
    begun = time.process_time()
    explain(tmp_path)
    assert time.process_time() - begun < 10, "it grows faster than the file"


def test_of_a_large_file_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explaining, "MOST_BYTES", 2000)
    lines = said(tmp_path, a__err=OOM + "step\n" * 1000 + DISK)
    assert lines[0].endswith(": file system failed")
    assert lines[3] == f"  a.err: {DISK.strip()}"


def test_the_source_code_in_a_traceback_is_not_what_a_log_says(tmp_path: Path) -> None:
    """Also with the prefix that srun -l or torchrun puts before each line."""
    for prefix in ("", "[rank0]: ", "3: "):
        text = [
            "Traceback (most recent call last):",
            '  File "/repo/recipes/toy.py", line 7, in main',
            '    raise ValueError("CUDA out of memory")  # or an Input/output error',
            "          ^^^^^",
            "ValueError: no such thing",
        ]
        lines = said(tmp_path, job__out="".join(f"{prefix}{line}\n" for line in text))
        assert lines[0] == "no known cause in 1 file"
    lines = said(tmp_path, job__out="\n".join([*text, OOM]))
    assert lines[0] == "most likely cause in the logs: CUDA out of memory"
