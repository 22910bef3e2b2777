"""Parts of a recipe's optimisation: the precision, the learning rate for a batch size, weight
decay, averaged weights.
"""

import itertools
import math
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import swa_utils

from recipes.core.config.run_keys import Dtype, TrainKeys
from recipes.core.data.sampling import GlobalBatches
from recipes.core.errors import InputError
from recipes.core.train import sharding
from recipes.core.train.run import Run

Layer = nn.Linear | nn.Conv2d  # that has a matrix, and may make the logits
NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def autocast(run: Run, cfg: TrainKeys) -> torch.autocast:
    """The context of the forward pass for ``dtype``. auto: bfloat16 if the GPUs of all ranks
    support it. A collective.

    Also sets, for the whole process, how GPUs multiply float32 and how cuDNN chooses its
    algorithms.
    """
    device = run.world.device
    chosen = cfg.dtype
    why = ""
    has_it = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    # Every rank takes part, whatever its keys: they have not been compared yet.
    count = int(run.world.sum(torch.tensor(int(has_it), device=device)))
    if chosen is Dtype.auto:
        chosen = Dtype.bfloat16 if count == run.world.size else Dtype.float32
        why = " (auto)"
        if 0 < count < run.world.size:
            why = f" (auto; {count} of {run.world.size} GPUs have bfloat16)"
    run.say(f"dtype: {chosen.name}{why}{', deterministic' if cfg.deterministic else ''}")
    _choose_kernels(device, chosen, cfg.deterministic)
    lower = torch.float16 if chosen is Dtype.float16 else torch.bfloat16
    return torch.autocast(device.type, lower, enabled=chosen in (Dtype.bfloat16, Dtype.float16))


def lower_dtype(autocast: torch.autocast) -> torch.dtype | None:
    """The type in which products are computed; None if it is float32."""
    return autocast.fast_dtype if autocast._enabled else None


def _choose_kernels(device: torch.device, dtype: Dtype, deterministic: bool) -> None:
    if device.type == "cuda":
        # torch's default for convolutions is TF32. torch.compile reads these names, not the newer
        # fp32_precision.
        torch.backends.cudnn.allow_tf32 = dtype is Dtype.tf32
        torch.set_float32_matmul_precision("high" if dtype is Dtype.tf32 else "highest")
    elif _is_amd():
        _multiply_with_onednn()
    torch.backends.cudnn.benchmark = not deterministic  # shapes do not change from step to step


def _is_amd() -> bool:
    """Whether the CPUs of this node are made by AMD."""
    # one line for each of many properties of each core
    with open("/proc/cpuinfo", "rb", buffering=0) as facts:
        return b"AuthenticAMD" in facts.read(1024)


def _multiply_with_onednn() -> None:
    """Selects oneDNN for float32 products on CPUs of AMD, where it is up to twice as fast as MKL,
    torch's choice.

    torch does so only where bfloat16 is permitted. oneDNN does not round to it on these CPUs;
    should it do so, MKL stays.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    x = torch.linspace(0, 1, 2**14).view(128, 128)
    if not torch.allclose((x @ x).double(), x.double() @ x.double(), rtol=1e-5):
        torch.set_float32_matmul_precision(before)


def scaled_lr(run: Run, lr: float, lr_batch_size: int, batches: GlobalBatches) -> float:
    """``lr``, the rate for ``lr_batch_size`` samples (0: any number), scaled to the batch size
    (Goyal et al., 2017).
    """
    share = _of_batch(lr_batch_size, batches)
    if share != 1:
        run.say(
            f"lr: {lr * share:.4g} for batches of {share * lr_batch_size:g}, "
            f"scaled from {lr:g} for batches of {lr_batch_size}"
        )
    return lr * share


def rise_and_cosine(step: float, rise: float, total_steps: float) -> float:
    """The learning rate of a step as a fraction of its peak: a linear rise for ``rise`` steps, then
    a cosine to zero.
    """
    if step < rise:
        return (step + 1) / (rise + 1)
    share = (step - rise) / max(1.0, total_steps - rise)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, share)))


def decay_groups(net: nn.Module, weight_decay: float, others: float = 0.0) -> list[dict[str, Any]]:
    """Two groups for an optimiser, of what is trained: weights have ``weight_decay``, the others
    have ``others``.

    Weights are the matrices and filters that torch's modules call ``weight``. The others are norms,
    biases, class tokens, position embeddings and scales of layers.
    """
    weights = {
        p
        for module in net.modules()
        for name, p in module.named_parameters(recurse=False)
        if p.ndim > 1 and "weight" in name and not isinstance(module, NORMS)
    }
    trained = [p for p in net.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p in weights], "weight_decay": weight_decay},
        {"params": [p for p in trained if p not in weights], "weight_decay": others},
    ]


def layer_groups(
    net: nn.Module, lr: float, layer_decay: float, weight_decay: float
) -> list[dict[str, Any]]:
    """Groups as of `decay_groups`, with smaller rates near the input: ``lr`` for the head, and for
    each block ``layer_decay`` times the rate of the next one (Howard and Ruder, 2018). Blocks are
    those of `sharding.blocks`, and the children of ``net`` without them. ``depth``: 0 for the head,
    1 for the last block.
    """
    decay = {
        p: group["weight_decay"]
        for group in decay_groups(net, weight_decay)
        for p in group["params"]
    }
    of_heads = heads(net)
    block_of = {p: block for block in sharding.blocks(net) for p in block.parameters()}
    blocks = dict[object, list[nn.Parameter]]()
    for name, parameter in net.named_parameters():
        if parameter in decay and name.rpartition(".")[0] not in of_heads:
            block = block_of.get(parameter, name.partition(".")[0])
            blocks.setdefault(block, []).append(parameter)
    groups = []
    first = [p for layer in of_heads.values() for p in layer.parameters() if p in decay]
    for depth, parameters in enumerate([first, *reversed(blocks.values())]):
        for value in sorted({decay[p] for p in parameters}):
            chosen = [p for p in parameters if decay[p] == value]
            rate = lr * layer_decay**depth
            groups.append({"params": chosen, "lr": rate, "weight_decay": value, "depth": depth})
    return groups


def heads(net: nn.Module) -> dict[str, Layer]:
    """The layers that make the logits, by their names. torchvision: the last linear layer, or
    convolution. Some models of timm have several.
    """
    layers = {name: m for name, m in net.named_modules() if isinstance(m, Layer)}
    classifier: Any = getattr(net, "get_classifier", None)
    if not classifier:
        return dict([layers.popitem()])
    made = classifier()
    parts = [*made] if isinstance(made, tuple | list) else [made]
    parts.append(getattr(net, "aux_head", None))
    inside = {m for part in parts if isinstance(part, nn.Module) for m in part.modules()}
    return {name: m for name, m in layers.items() if m in inside}


def averaged(
    run: Run, net: nn.Module, decay: float, of_batch_size: int, batches: GlobalBatches
) -> swa_utils.AveragedModel | None:
    """An exponential moving average of ``net``'s weights and buffers, for `State.ema`. `loop.steps`
    updates it. None if decay is 0.

    decay: decay per step of ``of_batch_size`` samples (0: any size). It is scaled to the actual
    batch size, so that the average always covers the same number of samples.
    """
    if not decay:
        return None
    if isinstance(net, FSDPModule):
        raise InputError("ema=: strategy=fsdp has no averaged weights: leave ema= out")
    share = _of_batch(of_batch_size, batches)
    if share != 1:
        run.say(
            f"ema: decay {decay**share:.4g} for batches of {share * of_batch_size:g}, "
            f"scaled from {decay:g} for batches of {of_batch_size}"
        )
    return _Average(net, decay**share)


class _Average(swa_utils.AveragedModel):
    """torch's average of weights and buffers. torch's own update copies the step count to the GPU:
    the host would wait at each step.
    """

    def __init__(self, net: nn.Module, decay: float) -> None:
        super().__init__(net, use_buffers=True)
        self._decay = decay

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        averages = [*self.module.parameters(), *self.module.buffers()]
        values = [*model.parameters(), *model.buffers()]
        blended = [bool(self.n_averaged) and value.is_floating_point() for value in values]
        copied = [not is_blended for is_blended in blended]
        if any(blended):
            torch._foreach_lerp_(
                [*itertools.compress(averages, blended)],
                [*itertools.compress(values, blended)],
                1 - self._decay,
            )
        if any(copied):
            torch._foreach_copy_(
                [*itertools.compress(averages, copied)], [*itertools.compress(values, copied)]
            )
        self.n_averaged += 1


def _of_batch(size: int, batches: GlobalBatches) -> float:
    return min(batches.global_batch_size, batches.num_samples) / size if size else 1.0
