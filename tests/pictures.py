"""The pictures of the documentation, from real runs on a Slurm of two nodes: ``python -m
tests.pictures`` writes docs/pictures/*.svg.

requeue.svg: the loss of a run that is requeued in the middle. failure.svg: a terminal in which a
rank is killed, and then explained.
"""

from __future__ import annotations

import html
import json
import os
import re
import signal
import tempfile
import time
from pathlib import Path

from recipes.core.report import figure
from recipes.core.report.style import SHEET
from recipes.core.run import attempt as attempts
from recipes.core.run import rows
from tests import helpers
from tests.slurm import jobs
from tests.slurm.cluster import Cluster, running_cluster

PICTURES = helpers.ROOT / "docs" / "pictures"
LINE_PX = 19
CHARACTER_PX = 7.9
MOST = 112
DIGITS = (
    "dataset=digits",
    "device=cpu",
    "epochs=10",
    "log_every_steps=2",
    "checkpoint_every_steps=20",
)


def svg(width: float, height: float, style: str, content: str, title: str) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" role="img">'
    )
    return f"{head}<title>{html.escape(title)}</title><style>{style}</style>{content}</svg>\n"


def loss_figure(run_dir: Path) -> str:
    """The loss of a run over its steps; a dashed line and a number for each later attempt."""
    losses = [(float(row["step"]), row["loss"]) for row in rows.rows(run_dir)]
    started = attempts.every(run_dir)[::-1]
    begun = [attempt for attempt in started if attempt.has_begun]
    marks = [(attempt.facts()["step"], attempt.number) for attempt in begun[1:]]
    drawn = figure.figure(
        "Loss", ("optimiser step", "mean loss per sample"), [("loss", losses, "c0 d0")], marks=marks
    )
    content = re.search(r"<svg [^>]*><title>.*?</title>(.*)</svg>", drawn, re.DOTALL)
    assert content
    place = re.search(r'class="mark" d="M([0-9.]+) ', drawn)
    assert place, "the run was not requeued"
    named = (
        f'<text x="{float(place[1]) + 8:g}" y="{figure.TOP + 14}">requeued by Slurm, then '
        "resumed</text>"
    )
    background = f'<rect width="{figure.WIDTH}" height="{figure.HEIGHT}" style="fill:var(--bg)"/>'
    title = (
        "Loss of a run against its steps; a dashed line marks the requeue, after which the loss "
        "continues where it was"
    )
    return svg(figure.WIDTH, figure.HEIGHT, SHEET, background + content[1] + named, title)


def terminal(lines: list[tuple[str, str]], title: str) -> str:
    """Lines of a terminal, each with its colour: command, bad, plain or dim."""
    style = (
        "text{font:13px "
        "ui-monospace,Menlo,Consolas,monospace;white-space:pre}.command{fill:#7ee787}"
        ".bad{fill:#ff9a8f}.plain{fill:#e6e9ee}"
        ".dim{fill:#a3acb8}"
    )
    width = 24 + MOST * CHARACTER_PX
    height = 24 + LINE_PX * len(lines)
    texts = "".join(
        (
            f'<text x="12" y="{25 + LINE_PX * i}" class="{kind}" '
            f'xml:space="preserve">{html.escape(line[:MOST])}</text>'
        )
        for i, (line, kind) in enumerate(lines)
    )
    return svg(
        width,
        height,
        style,
        f'<rect width="100%" height="100%" rx="8" fill="#14171c"/>{texts}',
        title,
    )


def submit(slurm: Cluster, repo: Path, name: str) -> tuple[str, Path]:
    run_dir = repo / "runs" / "mnist" / name
    words = (*jobs.TWO_BY_TWO, "sbatch/mnist_2x8.sh", *DIGITS, f"run_dir={run_dir}")
    return jobs.sbatch(slurm, repo, repo / f"{name}.out", *words), run_dir


def await_step(run_dir: Path, step: int) -> None:
    helpers.wait_until(
        lambda: any(row["step"] >= step for row in rows.rows(run_dir)), 240, f"step {step}"
    )


def requeued(slurm: Cluster, repo: Path) -> Path:
    """A run that Slurm requeues while its loss falls."""
    job, run_dir = submit(slurm, repo, "preempted")
    await_step(run_dir, 40)
    slurm.run("scontrol", "requeue", job, check=True)
    helpers.wait_until(lambda: (run_dir / "summary.json").exists(), 400, "the end of the run")
    return run_dir


def killed(slurm: Cluster, repo: Path) -> list[tuple[str, str]]:
    """What a terminal shows of a run whose rank 3 is killed."""
    job, run_dir = submit(slurm, repo, "killed")
    await_step(run_dir, 60)
    (victim,) = [
        process.pid
        for process in slurm.processes(job_id=job, command="recipes.mnist")
        if "SLURM_PROCID=3" in Path(f"/proc/{process.pid}/environ").read_text().split("\0")
    ]
    os.kill(victim, signal.SIGKILL)
    slurm.wait_job(job, 120)
    log = (repo / "killed.out").read_text().splitlines()
    told = jobs.explain(slurm, repo, run_dir).splitlines()
    steps = [line for line in log if "  step " in line][-2:]
    shown = [
        (f"$ tail mnist-{job}.out", "command"),
        *((line, "plain") for line in steps),
        (f"$ kill -9 {victim}   # rank 3", "command"),
    ]
    shown += [(log[-1], "bad"), (f"$ python -m recipes.doctor explain runs/mnist/{job}", "command")]
    shown += [(told[0], "bad"), *((line, "dim") for line in told[1:7])]
    return [
        (line.replace(str(repo), "…").replace("runs/mnist/killed", f"runs/mnist/{job}"), kind)
        for line, kind in shown
    ]


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder, running_cluster() as slurm:
        os.chmod(folder, 0o755)
        repo = jobs.copy_repository(Path(folder) / "clone")
        (PICTURES / "requeue.svg").write_text(loss_figure(requeued(slurm, repo)))
        title = (
            "A rank is killed; the job's last line and explain name the rank, its host and the "
            "cause"
        )
        (PICTURES / "failure.svg").write_text(terminal(killed(slurm, repo), title))
    print(
        json.dumps({path.name: path.stat().st_size for path in sorted(PICTURES.glob("*.svg"))}),
        time.strftime("%F"),
    )


if __name__ == "__main__":
    main()
