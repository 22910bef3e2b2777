"""Sums, shares and learning rates that all recipes share, against formulas; and those of toy."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from recipes import cifar, gpt, toy
from recipes.conf.toy import Config
from recipes.core.config.run_keys import Dtype
from recipes.core.data.sampling import GlobalBatches
from recipes.core.train import loop, optimisation, scores
from recipes.core.train import world as worlds
from tests.distributed import one_rank

RUN: Any = SimpleNamespace(say=print)


def batches(global_batch_size: int, num_samples: int, per_epoch: int = 1) -> Any:
    return SimpleNamespace(
        global_batch_size=global_batch_size, num_samples=num_samples, per_epoch=per_epoch
    )


def test_top1_and_top5_hits() -> None:
    def hits(logits: torch.Tensor, *labels: int) -> list[int]:
        return scores.right(logits, torch.tensor(labels, dtype=torch.int64)).tolist()

    ten = torch.tensor([[9.0, 8, 7, 6, 5, 4, 3, 2, 1, 0]] * 5)
    assert hits(ten, 0, 1, 4, 5, 9) == [1, 3, 5]
    assert hits(ten, 0, -100, -1, 4, -100) == [1, 2, 2]  # that cannot be read
    assert hits(torch.zeros(10, 10), *range(10)) == [1, 5, 10]  # equal logits are no answer
    assert hits(torch.eye(3), 0, 1, 0) == [2, 3, 3]
    assert hits(torch.zeros(0, 10)) == [0, 0, 0]


@pytest.mark.parametrize(
    ("lr_batch_size", "batch_size", "samples", "expected"),
    [
        (256, 1024, 10_000, 0.4),
        (256, 64, 10_000, 0.025),
        (256, 1024, 512, 0.2),
        (0, 1024, 10_000, 0.1),
        (64, 64, 99, 0.1),
    ],
)
def test_the_rate_scales_with_batch_size(
    lr_batch_size: int, batch_size: int, samples: int, expected: float
) -> None:
    rate = optimisation.scaled_lr(RUN, 0.1, lr_batch_size, batches(batch_size, samples))
    assert rate == pytest.approx(expected)


def test_averaged_weights_scale_with_the_batch_size_and_resume() -> None:
    """With 0.81 a step of 128 samples it is 0.9 a step of 64."""
    net = nn.Linear(1, 1, bias=False)
    assert optimisation.averaged(RUN, net, 0.0, 128, batches(64, 999)) is None

    def average() -> Any:
        return optimisation.averaged(RUN, net, 0.81, 128, batches(64, 999))

    whole = average()
    first = average()
    second = average()
    for step, value in enumerate((1.0, 2.0, 4.0)):
        nn.init.constant_(net.weight, value)
        whole.update_parameters(net)
        (first if step < 2 else second).update_parameters(net)
        if step == 1:
            second.load_state_dict(first.state_dict())
    assert whole.module.weight.item() == pytest.approx(0.81 * 1 + 0.09 * 2 + 0.1 * 4)
    assert second.module.weight.item() == whole.module.weight.item()


def test_bfloat16_is_used_by_all_ranks_or_none() -> None:
    """This rank's CPU has none; with_it: GPUs of other ranks that have it."""

    def is_used(dtype: Dtype, with_it: int) -> bool:
        device = torch.device("cpu")
        world = SimpleNamespace(device=device, size=2, sum=lambda values: values + with_it)
        run: Any = SimpleNamespace(say=print, world=world)
        with optimisation.autocast(run, Config(dtype=dtype)):
            return torch.is_autocast_enabled("cpu")

    assert not is_used(Dtype.auto, 1)
    assert is_used(Dtype.auto, 2)
    assert is_used(Dtype.bfloat16, 0)
    assert not is_used(Dtype.float32, 2)


@pytest.mark.parametrize(
    ("dtype", "deterministic", "rounds"),
    [("float32", True, False), ("tf32", False, True), ("bfloat16", True, False)],
)
def test_how_gpus_multiply_float32(dtype: str, deterministic: bool, rounds: bool) -> None:
    try:
        optimisation._choose_kernels(torch.device("cuda"), Dtype[dtype], deterministic)
        assert torch.backends.cudnn.allow_tf32 == rounds
        assert torch.backends.cuda.matmul.allow_tf32 == rounds
        assert torch.backends.cudnn.benchmark is not deterministic
    finally:
        optimisation._choose_kernels(torch.device("cpu"), Dtype.float32, False)


@pytest.mark.parametrize("rounds", [False, True])
def test_cpus_of_amd_multiply_float32_with_onednn_if_it_is_exact(
    rounds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_float32_matmul_precision()
    times = torch.Tensor.__matmul__
    monkeypatch.setattr(optimisation, "_is_amd", lambda: True)
    if rounds:

        def rounded(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if x.dtype == torch.float32:
                x = x.bfloat16().float()
            return times(x, y)

        monkeypatch.setattr(torch.Tensor, "__matmul__", rounded)
    try:
        torch.set_float32_matmul_precision("highest")
        optimisation._choose_kernels(torch.device("cpu"), Dtype.float32, False)
        assert torch.get_float32_matmul_precision() == ("highest" if rounds else "medium")
    finally:
        torch.set_float32_matmul_precision(before)


def test_buffers_of_batch_norms_are_not_copied_in_each_forward_pass() -> None:
    norm = nn.Sequential(nn.Conv2d(1, 1, 1), nn.SyncBatchNorm(1))
    norm_with_queue = nn.Sequential(nn.BatchNorm2d(1))
    norm_with_queue.register_buffer("queue", torch.zeros(1))
    assert worlds._needs_buffers(norm_with_queue)
    assert not worlds._needs_buffers(norm)
    assert not worlds._needs_buffers(nn.Linear(1, 1))


def test_a_compiled_model_has_a_graph_for_each_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for more shapes than torch's own limit, beyond which a model is not compiled."""
    shapes = []
    torchs = torch.compile

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        shapes.append(tuple(inputs[-1].shape))
        return graph.forward

    monkeypatch.setattr(
        torch, "compile", lambda model, **how: torchs(model, backend=backend, **how)
    )
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    world: Any = SimpleNamespace(size=1, device=torch.device("cpu"))
    net = worlds.World.parallel(world, nn.Conv2d(3, 4, 3), Config(compile=True))
    wanted = [(batch, 3, px, px) for px in (8, 12, 16, 20, 24) for batch in (2, 3)]
    for shape in wanted * 2:
        net(torch.zeros(shape))
    assert shapes == wanted


def test_the_number_of_steps() -> None:
    for most, expected in ((0, 30), (7, 7), (99, 30)):
        cfg = Config(epochs=3, max_steps=most)
        assert loop.total_steps(cfg, batches(8, 80, 10)) == expected


def test_a_step_of_toy_equals_the_formula(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of three ranks: the gradient is that of the mean over the batch, of which it has
    its own part.
    """
    words = ("samples=12", "global_batch_size=7", "max_steps=1", "lr=0.1", "seed=4")
    trained = one_rank.train(toy, tmp_path, monkeypatch, *words, rank=1, size=3)
    inputs, targets = toy.make_data(Config(samples=12, seed=4))
    step, evaluation = trained.forwards
    mine = [int((inputs == row).all(1).nonzero()) for row in step.inputs]
    assert len(mine) == 2  # of a batch of 6: the last two share 12
    away = step.outputs - targets[mine]
    assert trained.rows[0]["loss"] == pytest.approx(away.square().sum().item() / 6)
    assert trained.rows[0]["lr"] == 0.1
    slope = 3 * 2 * away.sum() / 6  # times the ranks, over which gradients are averaged
    assert torch.allclose(evaluation.weights, step.weights - 0.1 * slope, rtol=1e-5)
    assert torch.equal(evaluation.inputs, inputs[4:8])
    mean = F.mse_loss(evaluation.outputs, targets[4:8]).item()
    assert trained.results["val_loss"] == pytest.approx(mean * 4 / 12)
    [group] = trained.run.state.optimizer.param_groups
    assert group["momentum"] == 0.9
    assert group["lr"] == 0.1


def test_only_matrices_and_filters_decay() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.class_token = nn.Parameter(torch.zeros(1, 1, 8))
            self.scale = nn.Parameter(torch.ones(8, 1, 1))
            self.slope = nn.PReLU(8)
            self.attention = nn.MultiheadAttention(8, 2)
            self.wide_norm = nn.LayerNorm((4, 8))
            self.conv = nn.Conv2d(3, 8, 2)
            self.frozen = nn.Linear(8, 8).requires_grad_(False)

    net = Net()
    names = {parameter: name for name, parameter in net.named_parameters()}
    decaying, rest = optimisation.decay_groups(net, 0.1, 0.01)
    weights = [names[p] for p in decaying["params"]]
    others = [names[p] for p in rest["params"]]
    assert weights == ["attention.in_proj_weight", "attention.out_proj.weight", "conv.weight"]
    assert sorted(others) == sorted({*names.values()} - {*weights, "frozen.weight", "frozen.bias"})
    assert decaying["weight_decay"] == 0.1
    assert rest["weight_decay"] == 0.01


def test_a_schedule_has_a_rate_at_its_ends() -> None:
    """Also if it only rises. A scheduler asks for one more rate than there are steps."""
    rates = [optimisation.rise_and_cosine(step, rise, 8) for step, rise in ((8, 8), (8, 4), (9, 4))]
    assert rates == pytest.approx([1.0, 0.0, 0.0])
    batches = GlobalBatches(100, 10, 0, 0, 1)
    [of_cifar] = cifar.lr_factors(cifar.Config(warmup=1.0), batches, 8, 1)
    assert [of_cifar(7), of_cifar(8)] == [8 / 9, 0]
    cfg = gpt.Config(warmup=0.0, cooldown=0.0)
    assert [gpt.lr_factor(cfg, 8, step) for step in (0, 7, 8)] == [1, 1, 0]
