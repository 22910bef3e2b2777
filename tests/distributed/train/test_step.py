"""Parts of a step on real ranks: accumulation, averaged weights, buffers, and waiting for all ranks
without a collective.
"""

from __future__ import annotations

import json
import socket
import textwrap
from pathlib import Path

import pytest
import torch

from tests import helpers

# A recipe of a linear model and batch normalisation, made for the test; WORK is its main's body.
RECIPE = """
from recipes.core.run import entry
START = entry.begin("mnist")
import dataclasses, json, time, torch
from torch import nn
from recipes.core.train import optimisation, session; from recipes.core.train import loop, scores
from recipes.core.train.checkpoint import State
from recipes.core.data.sampling import GlobalBatches
from recipes.core.errors import InputError, MachineError

def main(cfg, run):
    world = run.world
    torch.manual_seed(0)
    batches = GlobalBatches(24, cfg.global_batch_size, 0, world.rank, world.size)
    x = torch.randn(24, 3); y = x @ torch.tensor([[1.0], [2.0], [3.0]])
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)) if NORM else nn.Sequential(nn.Linear(3, 1))
    model = world.parallel(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    calls = []
    def train(evaluate, ema=None, losses=lambda shard: (model(x[shard.indices]) - y[shard.indices]).square()[:, 0]):
        run.resume(State(net, optimizer, scheduler, ema), batches)
        for step in loop.steps(run, cfg, model, batches, evaluate):
            for shard in step.shards:
                calls.append(len(shard.indices))
                step.backward(losses(shard))
            optimizer.step()
            scheduler.step()
        return run.results
    def tell(**found):
        with open(f"{run.dir}/found-{world.rank}.json", "w") as file:
            json.dump(found, file)
WORK
session.run(main, START)
"""
FIT = """
    def evaluate():
        with scores.evaluation(run) as best:
            assert not best.training
            tell(calls=calls, mean=[float(v) for b in best.buffers() if b.is_floating_point() for v in b],
                 weights=[float(v) for p in best.parameters() for v in p.flatten()])
        assert net.training
        return {"val_top1": 0.0}
    return train(evaluate, optimisation.averaged(run, net, EMA, 0, batches))
"""
# The ranks meet with as much patience as their imports may take; what follows waits no longer than
# this.
IMPATIENT = """
assert world.timeout_s == 100
world = dataclasses.replace(world, timeout_s={timeout_s})
"""


def run_ranks(
    folder: Path, work: str, *keys: str, ranks: int = 2, norm: bool = False, ema: float = 0
) -> helpers.Ended:
    """The test's recipe with ``work`` as its body, on ``ranks`` processes with ranks in their
    environment.
    """
    code = RECIPE.replace("WORK", textwrap.indent(textwrap.dedent(work), "    ")).replace(
        "NORM", str(norm)
    )
    words = [
        "device=cpu",
        "cpu_threads=1",
        "epochs=2",
        "global_batch_size=8",
        "log_every_steps=1",
        f"run_dir={folder}",
        *keys,
    ]
    return helpers.run_ranks(code.replace("EMA", str(ema)), words, ranks)


def found(folder: Path, rank: int = 0) -> dict[str, list[float]]:
    content = json.loads((folder / f"found-{rank}.json").read_text())
    assert isinstance(content, dict)
    return content


def test_accumulation_gives_the_same_weights(tmp_path: Path) -> None:
    for name, keys, ranks in (("whole", [], 1), ("ranks", ["accumulate=2"], 2)):
        run_ranks(tmp_path / name, FIT, *keys, ranks=ranks).expect(0)
    whole, ranks_ = (found(tmp_path / name) for name in ("whole", "ranks"))
    assert whole["calls"] == [8] * 6
    assert ranks_["calls"] == [2] * 12
    assert ranks_["weights"] == pytest.approx(whole["weights"], rel=1e-5)
    losses = [[row["loss"] for row in helpers.rows(tmp_path / name)] for name in ("whole", "ranks")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_forward_pass_that_bypasses_ddp_ends_all_ranks(tmp_path: Path) -> None:
    ended = run_ranks(
        tmp_path, "return train(dict, losses=lambda shard: net(x[shard.indices])[:, 0])"
    ).expect(1)
    line = (
        "the forward pass has bypassed DDP: call the model that world.parallel() returned, "
        "and pass the same model to loop.steps()"
    )
    assert line in ended.out
    assert "Traceback" not in ended.out


@pytest.mark.parametrize(("ranks", "status"), [(1, 0), (2, 1)])
def test_a_parameter_without_a_gradient_is_named(tmp_path: Path, ranks: int, status: int) -> None:
    work = """
    net.spare = nn.Parameter(torch.zeros(1))
    model = world.parallel(net)
    return train(dict)
    """
    ended = run_ranks(tmp_path, work, ranks=ranks)
    assert "spare: no gradient after step.backward(): use it in forward()" in ended.out
    assert ended.status == status
    assert "Traceback" not in ended.out


def test_all_ranks_evaluate_the_same_weights(tmp_path: Path) -> None:
    for ema in (0.0, 0.5):
        folder = tmp_path / str(ema)
        run_ranks(folder, FIT, norm=True, ema=ema).expect(0)
        assert found(folder, 0) == found(folder, 1)
        content = torch.load(folder / "checkpoints" / "step-00000006.pt", weights_only=True)
        prefix, kept = ("module.", content["ema"]) if ema else ("", content["model"])
        assert found(folder)["mean"][:3] == pytest.approx(kept[f"{prefix}0.running_mean"].tolist())


def test_all_ranks_wait_for_slow_work_that_makes_progress(tmp_path: Path) -> None:
    work = """
    def work(beat):
        world.store.get("begun/0")  # or rank 0 might wait for less than all of it
        for turn in range(6 if world.rank else 0):
            time.sleep(0.4)
            beat(turn)
        return world.rank + 10
    assert world.gather(bytes(world.rank + 1)) == [b"\\0", b"\\0\\0"]
    began, beats = time.monotonic(), world.pulse.read()[0]
    world.store.set(f"begun/{world.rank}", "")
    assert world.together("slow", work) == world.rank + 10
    has_beaten = world.pulse.read()[0] - beats > 4  # or the watchdog would end a rank that waits
    assert time.monotonic() - began > 2.3  # longer than timeout_s, on the rank that had nothing to do too
    raise InputError("all came" if has_beaten else "silent")
    """
    ended = run_ranks(
        tmp_path, IMPATIENT.format(timeout_s=1.5) + textwrap.dedent(work), "timeout_s=100"
    )
    assert ended.status == 2, ended.out
    assert "all came" in ended.out, ended.out
    assert "silent" not in ended.out, ended.out


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (
            "time.sleep(3.5 if world.rank else 0)",
            "rank 1 made no progress with slow in 1 s (timeout_s)",
        ),
        ("if world.rank: raise MachineError('the disk is full')", "HOST: the disk is full"),
        ("if world.rank: raise OSError(5, 'Input/output error')", "HOST: "),
        ("if not world.rank: raise InputError('no such folder')", "HOST: no such folder"),
    ],
)
def test_all_ranks_end_if_one_fails(tmp_path: Path, work: str, words: str) -> None:
    code = f"def work(beat):\n    {work}\nworld.together('slow', work)\ntime.sleep(9)"
    ended = run_ranks(tmp_path, IMPATIENT.format(timeout_s=1) + code, "timeout_s=100")
    assert ended.status != 0
    said = [line for line in ended.lines if words.replace("HOST", socket.gethostname()) in line]
    assert len(said) >= 1, ended.out
