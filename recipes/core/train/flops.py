"""Arithmetic of a training step, and the share of a GPU's peak that it uses (model FLOP/s utilisation)."""

import math
from typing import Any

import torch
from torch import nn

# TFLOP/s of matrix products in bfloat16 or float16 without sparsity, from the vendors' data sheets. The first that is in the GPU's name counts.
PEAKS = {
    "B200": 2250.0, "GH200": 989.0, "H200": 989.0, "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.0, "L40S": 362.0, "L40": 181.0,
    "L4": 121.0, "A100": 312.0, "A40": 150.0, "A30": 165.0, "A10": 125.0, "V100": 125.0, "T4": 65.0, "MI300X": 1307.0, "MI250X": 383.0,
}  # fmt: skip


class Flops:
    """Counts floating-point operations of convolutions and linear layers until `stop`. The backward pass has as many as the forward pass
    for each weight that is trained, and as many again for each input that has a gradient."""

    def __init__(self, model: nn.Module) -> None:
        self._found, kinds = 0, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
        self._hooks = [part.register_forward_hook(self._add) for part in model.modules() if isinstance(part, kinds)]

    def _add(self, part: nn.Module, inputs: Any, output: Any) -> None:
        weight = part.weight
        assert isinstance(weight, torch.Tensor)
        # Each output has one product and one sum per weight of its row, or of its output channel.
        passes = 1 + weight.requires_grad + inputs[0].requires_grad
        self._found += 2 * passes * output.numel() * math.prod(weight.shape[1:])

    def stop(self) -> int:
        """Ends the count. Returns the operations of forward and backward pass."""
        for hook in self._hooks:
            hook.remove()
        return self._found


def achieved(flops_per_s: float, device: torch.device) -> dict[str, float]:
    """``tflops`` of a rank; on a GPU whose peak is known, also ``mfu``, their share of its peak in bfloat16 or float16."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peak = next((value for known, value in PEAKS.items() if known in name), 0.0)
    found = {"tflops": float(f"{flops_per_s / 1e12:.4g}")}
    return found | ({"mfu": round(flops_per_s / 1e12 / peak, 3)} if peak else {})
