"""A run that stops in the middle of an epoch and resumes ends with the state of a run that never
stopped, on each rank, to the last bit.

The model has dropout, batch normalization and averaged weights; the run has AdamW, a schedule,
accumulated gradients, and draws from the random generators of Python and NumPy. The state is
compared, because most of these do not show in the loss.
"""

from __future__ import annotations

from pathlib import Path

from recipes.core.train import checkpoint, loop
from tests import helpers, states

CODE = """
import os, random, signal
import numpy
from recipes import broken
from tests import states
from recipes.core.run import entry
from recipes.core.train import checkpoint, session
START = entry.begin("broken")

def each_step(run, where):
    random.random(), numpy.random.rand()
    if where == os.environ.get("STOP_AT") and run.world.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return 1.0

def main(cfg, run):
    results = broken.main(cfg, run)
    for net in (run.state.model, run.state.ema):  # rank 0's are saved, and used in an evaluation
        run.world.broadcast_buffers(net)
    content = checkpoint.content_of(run.state, {}, [checkpoint.rng_state(run.world.device)])
    print(f"state of rank {run.world.rank}: {states.digest(content)}", flush=True)
    return results

broken.misbehave = each_step
session.run(main, START)
"""
WORDS = (
    "device=cpu",
    "cpu_threads=1",
    "seed=3",
    "pace_s=0",
    "accumulate=2",
    "log_every_steps=100",
    "max_steps=24",
)


def states_of(ended: helpers.Ended) -> list[str]:
    return sorted(line for line in ended.lines if line.startswith("state of rank "))


def test_a_resumed_run_ends_with_the_state_of_one_that_never_stopped(tmp_path: Path) -> None:
    whole = helpers.run_ranks(CODE, [*WORDS, f"run_dir={tmp_path}/whole"], 2).expect(0)
    words = [*WORDS, f"run_dir={tmp_path}/stopped"]
    # Rank 1 alone gets a signal, in step 6.
    helpers.run_ranks(CODE, words, 2, STOP_AT="6").expect(75)
    status = helpers.read(tmp_path / "stopped", "status")
    assert status["state"] == "preempted"
    assert status["attempt"] == 0
    assert status["reason"] == "SIGTERM"
    step = status["step"]
    assert 7 <= step <= 7 + loop.AGREE_EVERY_STEPS
    folder = tmp_path / "stopped" / "checkpoints"
    content = checkpoint.read(folder / f"step-{step:08d}.pt")
    assert set(content) == {"model", "optimizer", "scheduler", "ema", "sampler", "rng", "meta"}
    saved = content["rng"]
    # the ranks drop different units
    assert saved[0]["torch"].tolist() != saved[1]["torch"].tolist()
    assert saved[0]["python"]["numbers"].tolist() != saved[1]["python"]["numbers"].tolist()
    assert saved[0]["numpy"]["keys"].tolist() != saved[1]["numpy"]["keys"].tolist()
    resumed = helpers.run_ranks(CODE, words, 2).expect(0)
    assert f"resumed from {folder}/step-{step:08d}.pt, step {step}" in resumed.lines
    assert "broken: 2 ranks on 1 node, cpu, gloo, attempt 2" in resumed.lines
    status = helpers.read(tmp_path / "stopped", "status")
    assert status["state"] == "done"
    assert status["attempt"] == 1
    assert status["step"] == 24
    assert status["reason"] == ""
    summary = helpers.read(tmp_path / "stopped", "summary")
    expected = {"world_size": 2, "steps": 24, "resumed_from_step": step, "restarts": 1}
    assert expected.items() <= summary.items()
    for rank in (0, 1):  # one log for both attempts
        log = (tmp_path / "stopped" / "logs" / f"rank{rank}.log").read_text()
        assert log.count(f"state of rank {rank}: ") == 2
    assert len(states_of(whole)) == 2
    assert states_of(resumed) == states_of(whole)
    assert states.at_step(tmp_path / "stopped", 24) == states.at_step(tmp_path / "whole", 24)
