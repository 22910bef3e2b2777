"""strategy=fsdp: the same results as DDP with a part of the memory, checkpoints that fit any number
of ranks.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from recipes.core.errors import InputError
from recipes.core.train import checkpoint, sharding
from tests import helpers

TOY = ("device=cpu", "log_every_steps=1", "global_batch_size=60")
# Prints the bytes of weights and optimiser state that each rank holds at the end.
TOLD = """
import recipes.toy as toy
from recipes.core.train.saving import Checkpoints
start, save = toy.entry.begin("toy"), Checkpoints.save
def told(checkpoints, **how):
    parts = list(checkpoints.state.model.parameters())
    for state in checkpoints.state.optimizer.state.values():
        parts += state.values()
    held = sum(getattr(part, "_local_tensor", part).nbytes for part in parts)
    print("bytes", checkpoints.world.rank, held, flush=True)
    save(checkpoints, **how)
Checkpoints.save = told
toy.session.run(toy.main, start)
"""


def train(run_dir: Path, ranks: int, *words: str) -> tuple[dict[int, float], list[int]]:
    """The loss of each step, and the bytes that each rank holds."""
    ended = helpers.run_ranks(TOLD, [*TOY, *words, f"run_dir={run_dir}"], ranks).expect(0)
    held = {}  # at the last save
    for line in ended.lines:
        if line.startswith("bytes "):
            _, rank, count = line.split()
            held[rank] = int(count)
    assert len(held) == ranks
    return {row["step"]: row["loss"] for row in helpers.rows(run_dir)}, list(held.values())


def weights(run_dir: Path) -> dict[str, Any]:
    newest = checkpoint.candidates(run_dir / "checkpoints")[0]
    model: dict[str, Any] = sharding.whole(checkpoint.read(newest)["model"])
    return model


def test_losses_are_those_of_ddp_with_a_part_of_the_memory(tmp_path: Path) -> None:
    alone, whole = train(tmp_path / "ddp", 4, "max_steps=6")
    for name, shard_size, copies in (("all", 0, 1), ("hybrid", 2, 2)):
        words = ("max_steps=6", "strategy=fsdp", f"shard_size={shard_size}")
        losses, held = train(tmp_path / name, 4, *words)
        assert losses == pytest.approx(alone, abs=1e-5)
        assert sum(held) == pytest.approx(copies * whole[0], rel=0.02)
        assert max(held) <= 0.3 * copies * whole[0]


def test_each_copy_of_a_model_is_divided_over_shard_size_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three copies over two ranks each. Two copies over three ranks would look the same to the
    training, but the files of two ranks, the size of a copy, would miss a third of the rows.
    """
    meshes: list[Any] = []
    monkeypatch.setattr(
        sharding,
        "init_device_mesh",
        lambda kind, shape, mesh_dim_names: meshes.append((shape, mesh_dim_names)),
    )
    monkeypatch.setattr(sharding, "fully_shard", lambda module, mesh: None)
    monkeypatch.setattr(torch.distributed, "broadcast", lambda tensor, source: None)
    for shard_size in (2, 0):
        sharding.divide(nn.Linear(1, 1), torch.device("cpu"), 6, shard_size)
    assert meshes == [((3, 2), ("replicate", "shard")), ((6,), ("shard",))]


def test_a_checkpoint_continues_on_any_number_of_ranks_and_with_ddp(tmp_path: Path) -> None:
    unbroken, _ = train(tmp_path / "one", 2, "max_steps=12", "strategy=fsdp", "force=true")
    train(tmp_path / "bits", 2, "max_steps=6", "strategy=fsdp")
    assert train(tmp_path / "bits", 2, "max_steps=12", "force=true")[0] == unbroken  # to the bit
    expected = weights(tmp_path / "one")
    torch.testing.assert_close(weights(tmp_path / "bits"), expected, rtol=0, atol=0)
    train(tmp_path / "other", 4, "max_steps=4", "strategy=fsdp")
    train(tmp_path / "other", 2, "max_steps=8", "force=true")
    losses, _ = train(tmp_path / "other", 3, "max_steps=12", "force=true", "strategy=ddp")
    assert losses == pytest.approx(unbroken, abs=1e-6)


def test_a_shard_size_of_the_run_that_does_not_divide_the_ranks_is_replaced(
    tmp_path: Path,
) -> None:
    train(tmp_path, 4, "max_steps=4", "strategy=fsdp", "shard_size=2")
    losses, _ = train(tmp_path, 3, "max_steps=8", "force=true")
    assert sorted(losses) == [1, 2, 3, 4, 5, 6, 7, 8]
    line = "shard_size=2 of the resumed run does not divide 3 ranks: this run uses shard_size=0, "
    assert (tmp_path / "logs/rank0.log").read_text().count(line) == 1
    assert "shard_size: 0\n" in (tmp_path / "config.yaml").read_text()
    typed = [*TOY, "force=true", "shard_size=2", f"run_dir={tmp_path}"]
    ended = helpers.run_ranks(TOLD, typed, 3).expect(2)
    assert "shard_size=2: must divide the number of ranks, 3" in ended.out


def test_each_rank_writes_its_rows_and_damaged_rows_are_not_used(tmp_path: Path) -> None:
    words = ("strategy=fsdp", "shard_size=2", "checkpoint_every_steps=4", "force=true")
    unbroken, _ = train(tmp_path / "unbroken", 4, "max_steps=12", *words)
    train(tmp_path / "run", 4, "max_steps=8", *words)
    folder = tmp_path / "run/checkpoints"
    names = sorted(path.name for path in folder.glob("step-*"))  # one copy of the model
    kinds = [re.sub(r"\.[0-9a-f]{16}-", ".ID-", name) for name in names]
    of_step_4 = ["step-00000004.ID-1of2.rows", "step-00000004.pt"]
    assert kinds == [*of_step_4, *(name.replace("4", "8") for name in of_step_4)]
    sizes = []
    for name in names[2:]:
        content = torch.load(folder / name, weights_only=True)
        sizes.append(checkpoint.size_of(content["rows"]))
    assert sizes[0] == pytest.approx(sizes[1], rel=0.1)
    rows = folder / names[2]
    rows.write_bytes(bytes([*rows.read_bytes()[:-400], *bytes(400)]))
    assert train(tmp_path / "run", 4, "max_steps=12", *words)[0] == unbroken  # from step 4
    assert f"{names[2]}: is damaged" in (tmp_path / "run/logs/rank0.log").read_text()
    (redone,) = folder.glob("step-00000008.*.rows")
    assert redone.name != names[2]
    (last,) = folder.glob("step-00000012.*.rows")
    shutil.copy(folder / names[0], last)  # of step 4
    line = r"its files do not belong together: copy all files step-00000012\.\*"
    with pytest.raises(InputError, match=line):
        checkpoint.read(folder / "step-00000012.pt")
    for path in (last, folder / "step-00000012.pt"):  # earlier versions wrote no ID
        content = torch.load(path)
        content.pop("id", None)
        torch.save(content, path)
    assert checkpoint.read(folder / "step-00000012.pt")["meta"]["step"] == 12
    torch.save({}, last)
    with pytest.raises(InputError, match="its files do not belong together"):
        checkpoint.read(folder / "step-00000012.pt")
    last.unlink()
    line = rf"{last.name}: cannot be read \(No such file"
    with pytest.raises(InputError, match=line):
        checkpoint.read(folder / "step-00000012.pt")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("strategy=fsdp", "shard_size=2"), "shard_size=2: must divide the number of ranks, 3"),
        (("strategy=fdsp",), "strategy=fdsp: must be one of ddp, fsdp"),
    ],
)
def test_what_cannot_be_divided_is_refused_in_one_line(
    tmp_path: Path, words: tuple[str, ...], line: str
) -> None:
    ended = helpers.run_ranks(TOLD, [*TOY, *words, f"run_dir={tmp_path}"], 3)
    assert ended.status == 2
    assert line in ended.out
    assert "Traceback" not in ended.out


DIRECT = """
import torch, torch.distributed as dist
from torch import nn
from recipes.core.train import sharding
dist.init_process_group("gloo")
net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last)
net.register_buffer("mask", torch.tensor([True, False]))
values = [*net.state_dict().values()]
if dist.get_rank():
    net.to("meta")
net.compile(backend="eager")
sharding.divide(net, torch.device("cpu"), 2, 0)
for value, divided in zip(values, net.state_dict().values(), strict=True):
    dist.broadcast(value.contiguous().view(torch.uint8), 0)
    whole = divided.full_tensor() if hasattr(divided, "full_tensor") else divided
    assert torch.equal(whole, value)
x = torch.ones(2, 3, 8, 8)
with torch.inference_mode(), sharding.unsharded(net):  # rank 1 makes one pass more
    for _ in range(1 + dist.get_rank()):
        net(x)
net(x).sum().backward()
torch.optim.SGD(net.parameters(), 0.1).step()
dist.destroy_process_group()
"""


def test_an_evaluation_before_the_first_step_and_other_memory_formats() -> None:
    """Of a model that only rank 0 has read."""
    helpers.run_ranks(DIRECT, [], 2).expect(0)


def test_shared_weights_stay_shared() -> None:
    net = nn.Sequential(nn.Embedding(5, 3), nn.LayerNorm(3), nn.Linear(3, 5, bias=False)).to("meta")
    net[2].weight = net[0].weight
    net[1].requires_grad_(False)
    net[1].register_buffer("scale", torch.ones(2, device="meta"))
    sharding.materialize(net, torch.device("cpu"))
    assert net[2].weight is net[0].weight
    assert not any(tensor.is_meta for tensor in (*net.parameters(), *net.buffers()))
    assert [p.requires_grad for p in net.parameters()] == [True, False, False]


def test_the_most_bytes_that_a_rank_gathers() -> None:
    """Two of the largest block, the gradient of the largest that is trained, and the rest."""
    blocks = [nn.Linear(2, 3), nn.Identity(), nn.Linear(4, 5).requires_grad_(False)]
    parts = {"blocks": nn.ModuleList(blocks), "head": nn.Linear(6, 7)}
    net = nn.ModuleDict({**parts, "frozen": nn.Linear(1, 1).requires_grad_(False)})
    for dtype, size in ((torch.bfloat16, 2), (torch.float32, 4)):
        expected = 2 * size * 25 + 4 * 9 + 4 * (49 + 2) + 4 * 49
        assert sharding.gathered_bytes(net, dtype) == expected


def test_all_ranks_divide_an_uneven_batch_into_as_many_parts(tmp_path: Path) -> None:
    words = [
        "device=cpu",
        "dataset=fake",
        "strategy=fsdp",
        "accumulate=2",
        "global_batch_size=3",
        "max_steps=2",
    ]
    code = "from recipes import mnist; mnist.session.run(mnist.main, mnist.entry.begin('mnist'))"
    helpers.run_ranks(code, [*words, "timeout_s=20", f"run_dir={tmp_path}"], 2).expect(0)


def test_muon_treats_whole_matrices(tmp_path: Path) -> None:
    """Recipe gpt, whose rows are the same with and without division."""
    words = [
        "device=cpu",
        "dataset=bytes",
        "seq_len=16",
        "global_batch_size=4",
        "max_steps=3",
        "log_every_steps=1",
        "sample=0",
    ]
    code = "from recipes import gpt; gpt.session.run(gpt.main, gpt.entry.begin('gpt'))"
    losses = []
    for strategy in ("ddp", "fsdp"):
        run_dir = tmp_path / strategy
        keys = [*words, f"strategy={strategy}", f"run_dir={run_dir}"]
        helpers.run_ranks(code, keys, 2).expect(0)
        losses.append([row["loss"] for row in helpers.rows(run_dir)])
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
