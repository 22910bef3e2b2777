"""Parts of a step on real ranks: accumulation, averaged weights, buffers, and waiting for all ranks
without a collective.
"""

from __future__ import annotations

import socket
import textwrap
from pathlib import Path

import pytest
import torch

from recipes.core.data.sampling import GlobalBatches
from tests import helpers

# A recipe of a linear model and batch normalisation, made for the test; WORK is its main's body.
RECIPE = """
from recipes.core.run import entry
START = entry.begin("mnist")
import dataclasses, json, time, torch
from torch import nn
from recipes.core.train import loop, optimisation, scores, session
from recipes.core.train.checkpoint import State
from recipes.core.data.sampling import GlobalBatches
from recipes.core.errors import InputError, MachineError

def main(cfg, run):
    world = run.world
    torch.manual_seed(0)
    batches = GlobalBatches(24, cfg.global_batch_size, 0, *world.data)
    x = torch.randn(24, 3)
    y = x @ torch.tensor([[1.0], [2.0], [3.0]])
    norms = [nn.BatchNorm1d(3)] if NORM else []
    net = nn.Sequential(*norms, nn.Linear(3, 1))
    model = world.parallel(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    calls = []
    def losses_of(part):
        return (model(x[part.indices]) - y[part.indices]).square()[:, 0]
    def train(evaluate, ema=None, losses=losses_of, weights=lambda part: None):
        run.resume(State(net, optimizer, scheduler, ema), batches)
        for step in loop.steps(run, cfg, model, batches, evaluate):
            for part in step.parts:
                calls.append(len(part.indices))
                step.backward(losses(part), weights(part))
            optimizer.step()
            scheduler.step()
        return run.results
    def tell(**values):
        with open(f"{run.dir}/values-{world.rank}.json", "w") as file:
            json.dump(values, file)
WORK
session.run(main, START)
"""
FIT = """
    def evaluate():
        with scores.evaluation(run) as best:
            assert not best.training
            buffers = [buffer for buffer in best.buffers() if buffer.is_floating_point()]
            mean = [float(value) for buffer in buffers for value in buffer]
            weights = [float(value) for p in best.parameters() for value in p.flatten()]
            tell(calls=calls, mean=mean, weights=weights)
        assert net.training
        return {"val_top1": 0.0}
    return train(evaluate, optimisation.averaged(run, net, EMA, 0, batches))
"""
# Sample i has 1 to 6 tokens, and its loss is the mean over them.
TOKENS = torch.arange(24) % 6 + 1
WEIGHTED = """
    tokens = torch.arange(24) % 6 + 1
    net.double()
    x = x.double()
    y = y.double()
    model = world.parallel(net, cfg)
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    def evaluate():
        full = [getattr(p, "full_tensor", lambda p=p: p)() for p in net.parameters()]
        tell(weights=[float(value) for p in full for value in p.flatten()])
        return {}
    return train(evaluate, weights=lambda part: tokens[part.indices])
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
    body = textwrap.indent(textwrap.dedent(work), "    ")
    code = RECIPE.replace("WORK", body).replace("NORM", str(norm)).replace("EMA", str(ema))
    words = [
        "device=cpu",
        "cpu_threads=1",
        "epochs=2",
        "global_batch_size=8",
        "log_every_steps=1",
        f"run_dir={folder}",
        *keys,
    ]
    return helpers.run_ranks(code, words, ranks)


def values(folder: Path, rank: int = 0) -> dict[str, list[float]]:
    return helpers.read(folder, f"values-{rank}")


def test_accumulation_gives_the_same_weights(tmp_path: Path) -> None:
    losses = []
    for name, keys, ranks in (("whole", [], 1), ("divided", ["accumulate=2"], 2)):
        run_ranks(tmp_path / name, FIT, *keys, ranks=ranks).expect(0)
        losses.append([row["loss"] for row in helpers.rows(tmp_path / name)])
    whole = values(tmp_path / "whole")
    divided = values(tmp_path / "divided")
    assert whole["calls"] == [8] * 6
    assert divided["calls"] == [2] * 12
    assert divided["weights"] == pytest.approx(whole["weights"], rel=1e-5)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def plain_training(batch_size: int) -> tuple[list[float], list[float]]:
    """The losses and the last weights of WEIGHTED, in one process that has all samples of a batch.
    The loss is the mean over its tokens.
    """
    torch.manual_seed(0)
    batches = GlobalBatches(24, batch_size, 0, 0, 1)
    x = torch.randn(24, 3)
    y = x @ torch.tensor([[1.0], [2.0], [3.0]])
    net = torch.nn.Linear(3, 1).double()
    x = x.double()
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    losses = []
    for epoch in range(2):
        for batch in batches.epoch(epoch):
            away = net(x[batch.indices]) - y[batch.indices]
            of_tokens = away.square()[:, 0].repeat_interleave(TOKENS[batch.indices])
            loss = of_tokens.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, torch.cat([p.detach().flatten() for p in net.parameters()]).tolist()


@pytest.mark.parametrize(
    ("ranks", "batch_size", "keys"),
    [
        (1, 7, ["accumulate=2"]),
        (2, 7, []),
        (3, 7, ["accumulate=2"]),
        (3, 2, []),  # the third rank has no sample
        (2, 7, ["strategy=fsdp", "accumulate=2"]),
    ],
)
def test_weights_give_the_mean_over_all_tokens_of_the_batch(
    tmp_path: Path, ranks: int, batch_size: int, keys: list[str]
) -> None:
    """If each rank divides by its own weights, the first losses differ by 5 % and more."""
    words = [f"global_batch_size={batch_size}", *keys]
    run_ranks(tmp_path, WEIGHTED, *words, ranks=ranks).expect(0)
    losses, weights = plain_training(batch_size)
    assert [row["loss"] for row in helpers.rows(tmp_path)] == pytest.approx(losses, rel=1e-6)
    for rank in range(ranks):
        assert values(tmp_path, rank)["weights"] == pytest.approx(weights, rel=1e-6)


def test_a_forward_pass_that_bypasses_ddp_ends_all_ranks(tmp_path: Path) -> None:
    """Also if that of the first part has not."""
    losses = "lambda part: (model if len(calls) % 2 else net)(x[part.indices])[:, 0]"
    ended = run_ranks(tmp_path, f"return train(dict, losses={losses})", "accumulate=2").expect(1)
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
        evaluated = values(folder, 0)
        assert evaluated == values(folder, 1)
        content = torch.load(folder / "checkpoints" / "step-00000006.pt", weights_only=True)
        saved = (
            content["ema"]["module.0.running_mean"] if ema else content["model"]["0.running_mean"]
        )
        assert evaluated["mean"][:3] == pytest.approx(saved.tolist())


def test_all_ranks_wait_for_slow_work_that_makes_progress(tmp_path: Path) -> None:
    work = """
    def work(beat):
        world.store.get("begun/0")  # or rank 0 might wait for less than all of it
        for turn in range(6 if world.rank else 0):
            time.sleep(0.4)
            beat(turn)
        return world.rank + 10
    assert world.gather(bytes(world.rank + 1)) == [b"\\0", b"\\0\\0"]
    began = time.monotonic()
    beats = world.pulse.read()[0]
    world.store.set(f"begun/{world.rank}", "")
    assert world.together("slow", work) == world.rank + 10
    has_beaten = world.pulse.read()[0] - beats > 4  # or the watchdog would end a rank that waits
    # longer than timeout_s, on the rank that had nothing to do too
    assert time.monotonic() - began > 2.3
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
        (  # a value that stays the same is no progress
            "for _ in range(12 * world.rank): time.sleep(0.3); beat(5)",
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


def test_a_recipes_own_kind_of_input_error_is_an_input_error_on_all_ranks(tmp_path: Path) -> None:
    code = """
    class Unlabelled(InputError): pass
    def work(beat):
        if world.rank: raise Unlabelled('no label')
    try:
        world.together('slow', work)
    except InputError:
        print(f'rank {world.rank}: input', flush=True)
    """
    ended = run_ranks(
        tmp_path, IMPATIENT.format(timeout_s=5) + textwrap.dedent(code), "timeout_s=100"
    )
    assert {"rank 0: input", "rank 1: input"} <= {line.strip() for line in ended.lines}, ended.out
