"""The recipe imagenet on real ranks: files and packed copies of them to a summary, odd files on the way, every key's effect."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from recipes import imagenet
from recipes.conf.imagenet import Config
from recipes.core.images import LoadedShard
from tests import helpers

LOCAL = (
    sys.executable,
    str(helpers.ROOT / "launch.py"),
    "recipe=imagenet",
    "launcher=local",
    "device=cpu",
    "cpu_threads=1",
)
SMALL = (
    "arch=resnet18", "px=32", "val_px=32", "val_resize=36", "global_batch_size=16", "log_every_steps=1", "min_crop=0.5",
    "warmup_epochs=1", "num_workers=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3 classes, 48 images to train on and 37 to evaluate, two of each damaged besides."""
    folder = tmp_path_factory.mktemp("photos")
    helpers.write_images(folder / "train", 3, 16, 40)
    helpers.write_images(folder / "val", 3, 13, 40, seed=1)
    for extra in ("class0/0.JPEG", "class1/5.JPEG"):
        (folder / "val" / extra).unlink()
    for split in ("train", "val"):
        whole = (folder / split / "class2" / "2.JPEG").read_bytes()
        (folder / split / "class2" / "broken.JPEG").write_bytes(whole[:300])
        (folder / split / "class2" / "empty.JPEG").write_bytes(b"")
    return folder


@pytest.fixture(scope="module", params=[helpers.long("files"), "jpeg", helpers.long("raw")])
def data_dir(request: pytest.FixtureRequest, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "files":
        return photos
    folder = tmp_path_factory.mktemp(request.param)
    words = [f"source={photos}", f"data_dir={folder}", f"encoding={request.param}", "size=36", "workers=1"]
    ended = helpers.run_fork([sys.executable, "-m", "recipes.prepare", "imagenet", *words])
    assert ended.status == 0, ended.out
    assert "broken.JPEG" in ended.out
    return folder


def test_images_are_learnt_and_each_is_counted_once(data_dir: Path, photos: Path, tmp_path: Path) -> None:
    packed = data_dir != photos
    words = [
        "ranks_per_node=2",
        "epochs=4",
        "ema=0.3",
        "lr_batch_size=32",
        "lr=0.06",
        "mixup=0.1",
        f"data_dir={data_dir}",
        f"run_dir={tmp_path}",
    ]
    stage = [f"stage_dir={tmp_path}/node"] if packed else []
    ended = helpers.run_fork([*LOCAL, *SMALL, *words, *stage])
    assert ended.status == 0, ended.out
    summary = helpers.read(tmp_path, "summary")
    assert (summary["world_size"], summary["val_samples"]) == (2, 37)
    assert summary["steps"] == 4 * (3 if packed else 4)  # 48 or 50 files in batches of 16
    assert summary["val_top1"] > 0.6  # a third by chance
    assert summary["val_top5"] == 1
    assert summary["skipped_samples"] == (0 if packed else 4)
    if packed:
        assert len(list((tmp_path / "node").glob("*/index.json"))) == 1
    else:
        assert all(f"class2/{name}.JPEG" in ended.out for name in ("broken", "empty"))


@pytest.mark.long
def test_any_number_of_ranks_evaluates_the_same(photos: Path, tmp_path: Path) -> None:
    keys = [*SMALL, f"data_dir={photos}", "epochs=1"]
    ended = helpers.run_fork([*LOCAL, *keys, "ranks_per_node=2", f"run_dir={tmp_path}/run"])
    assert ended.status == 0, ended.out
    counts = set()
    for ranks in (1, 2, 3, 4):
        place = [
            f"ranks_per_node={ranks}",
            f"resume={tmp_path}/run/checkpoints/step-00000004.pt",
            f"run_dir={tmp_path}/{ranks}",
        ]
        ended = helpers.run_fork([*LOCAL, *keys, *place, "evaluate=true"])
        assert ended.status == 0, ended.out
        result = helpers.read(tmp_path / str(ranks), "summary")
        counts.add((result["val_samples"], result["val_top1"], result["val_top5"]))
        assert (result["skipped_samples"], result["steps"]) == (2, 4)
    trained = helpers.read(tmp_path / "run", "summary")
    assert counts == {(37, trained["val_top1"], trained["val_top5"])}


@pytest.mark.long
def test_dev_runs_whole_on_random_images(tmp_path: Path) -> None:
    words = ["variant=dev", "max_steps=3", "ranks_per_node=2", "accumulate=2", "optimizer=lars", f"run_dir={tmp_path}"]
    ended = helpers.run_fork([*LOCAL, *words, "schedule=step", "small_px=32"])
    assert ended.status == 0, ended.out
    assert helpers.read(tmp_path, "summary")["steps"] == 3


@pytest.mark.parametrize(
    ("words", "status", "expected"),
    [
        helpers.long(["arch=resnet51", "variant=dev"], 2, "near it: "),
        (["sync_bn=true", "variant=dev"], 2, "sync_bn=true: torch has it for GPUs only"),
        (["data_dir=/nonexistent"], 2, "data_dir="),
        helpers.long(["variant=dev", "arch=vit_b_16"], 2, "arch=vit_b_16: takes no images of 64 px"),
        helpers.long(["variant=dev", "small_px=16"], 2, "small_px=16: wants 32 to px"),
        helpers.long(["stage_dir=$NO_SUCH_VARIABLE", "data_dir={photos}"], 2, "stage_dir=$NO_SUCH_VARIABLE"),
        (["stage_dir={tmp}", "data_dir={photos}"], 2, "python -m recipes.prepare imagenet"),
        helpers.long(["evaluate=true", "variant=dev"], 2, "evaluate=true"),
        (["pretrained=true", "variant=dev"], 3, "python -m recipes.prepare weights arch=resnet18"),
    ],
)
def test_what_cannot_be_trained_is_one_line(
    words: list[str], status: int, expected: str, photos: Path, tmp_path: Path
) -> None:
    given = [word.replace("{photos}", str(photos)).replace("{tmp}", str(tmp_path / "stage")) for word in words]
    environ = helpers.clean_environment(TORCH_HOME=str(tmp_path))
    ended = helpers.run_fork([*LOCAL, f"run_dir={tmp_path}/run", *given], environ=environ)
    assert ended.status == status, ended.out
    assert expected in ended.lines[-1]
    assert "Traceback" not in ended.out


def test_images_grow_by_32_and_the_last_quarter_is_whole() -> None:
    cfg = Config(small_px=128, px=192)
    sides = [imagenet.side(cfg, 16, epoch) for epoch in range(16)]
    assert sides == sorted(sides)
    assert (sides[0], sides[12:], set(sides)) == (128, [192] * 4, {128, 160, 192})
    assert imagenet.side(Config(), 90, 0) == 224


def test_the_step_schedule_is_a_tenth_at_each_third() -> None:
    cfg = Config(schedule=imagenet.Schedule.step, warmup_epochs=0)
    factors = [imagenet.lr_factor(cfg, 10, 90, step) for step in range(90)]
    assert factors == pytest.approx([1.0] * 30 + [0.1] * 30 + [0.01] * 30)


def test_warm_up_and_cosine() -> None:
    factors = [imagenet.lr_factor(Config(warmup_epochs=2), 10, 100, step) for step in range(100)]
    assert factors[:21] == sorted(factors[:21])
    assert factors[20] == 1
    assert factors[20:] == sorted(factors[20:], reverse=True)
    assert 0 < factors[99] < 0.001


def test_mixup_blends_pairs_alike_on_every_rank() -> None:
    labels = torch.arange(6)
    shard = LoadedShard(3, 5, labels, 12, labels, labels, labels > 2)
    x = torch.randn(6, 3, 4, 4)
    blended, others, share = imagenet.mixed(Config(mixup=0.4), shard, x)
    assert 0 < share < 1
    assert torch.allclose(blended, share * x + (1 - share) * x.flip(0), atol=1e-6)
    assert others.tolist() == [5, 4, 3, 2, 1, 0]
    assert imagenet.mixed(Config(mixup=0.4), shard, x)[2] == share
    plain, same, whole = imagenet.mixed(Config(), shard, x)
    assert (plain is x, same is labels, whole) == (True, True, 1.0)


def test_decay_norms_puts_weight_decay_on_all() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    for decay_norms, expected in ((False, [1e-4, 0.0]), (True, [1e-4, 1e-4])):
        groups = imagenet.make_optimizer(Config(decay_norms=decay_norms), net, 0.1).param_groups
        assert [group["weight_decay"] for group in groups] == expected
        assert [len(group["params"]) for group in groups] == [1, 3]
