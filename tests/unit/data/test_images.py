"""Reading images: the same pixels on any number of ranks and workers, and what becomes of a file
that is odd or damaged.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
import shutil
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torchvision import transforms
from torchvision.transforms import functional as TF

from recipes.core.data import cifar10, datasets, decode, image_sets
from recipes.core.data.decode import Decoder, Pixels, make_decoder
from recipes.core.data.image_sets import IGNORE, Crops, Fake, Images, open_images
from recipes.core.data.packed import write
from recipes.core.data.sampling import GlobalBatches
from recipes.core.data.torch_loader import LoadedBatch, TorchLoader
from recipes.core.errors import InputError, MachineError, Stopped
from recipes.core.run.signals import StopFlag
from recipes.core.train import images
from tests.unit.data.common import encoded, picture, put

CPU = torch.device("cpu")
CLASSES = ("ant", "bee", "cat")
PER_CLASS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train/ and val/ of three classes; the pictures are of several sizes, some smaller than what
    is cut out of them.
    """
    root = tmp_path_factory.mktemp("images")
    for split, (label, name), i in itertools.product(
        ("train", "val"), enumerate(CLASSES), range(PER_CLASS)
    ):
        path = root / split / name / f"{i}.JPEG"
        put(path, encoded(picture(100 * label + i, 60 + 17 * i, 150 - 11 * i)))
    return root


@pytest.fixture(scope="module")
def packed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("packed") / "copy"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recipes.core.data.packed.write.SAMPLES_PER_SHARD", 10)
        write.pack(folder, root, size=64, quality=90, workers=1, say=lambda text: None)
    return root


# Functions with names: from Python 3.14 on, workers get them as pickles.
def constant_size(epoch: int) -> int:
    return 32


def rising_size(epoch: int) -> int:
    return 16 + 8 * epoch


def random_crop(size: Callable[[int], int], decoder: Decoder, pixels: Pixels, epoch: int) -> Pixels:
    return decode.random_crop(decoder, pixels, size(epoch), 0.08, True)


def centre_crop(size: int, resize: int, decoder: Decoder, pixels: Pixels, epoch: int) -> Pixels:
    return decode.centre_crop(decoder, pixels, size, resize)


def make_loader(
    source: Images,
    *,
    decoder: str = "torchvision",
    workers: int = 0,
    rank: int = 0,
    world_size: int = 1,
    batch: int = 10,
    size: Callable[[int], int] = constant_size,
    warn: Callable[[str], None] = lambda text: None,
) -> TorchLoader:
    batches = GlobalBatches(len(source), batch, 3, rank, world_size)
    crops = Crops(source, decoder, partial(random_crop, size))
    return TorchLoader(
        crops, batches, num_workers=workers, device=CPU, collate=image_sets.collate, warn=warn
    )


def centres(
    source: Images, size: int, resize: int, decoder: str = "torchvision", part: slice = slice(None)
) -> Any:
    """The images and labels of a part of ``source``."""
    crops = Crops(source, decoder, partial(centre_crop, size, resize))
    batches = make_loader(source).in_order(crops, part, 5)
    return (torch.cat(parts) for parts in zip(*batches, strict=True))


def content(parts: Iterator[LoadedBatch]) -> list[tuple[int, int, int, bytes, int]]:
    """Of each sample: epoch, batch, index, pixels, label."""
    return [
        (part.epoch, part.batch, int(index), image.contiguous().numpy().tobytes(), int(label))
        for part in parts
        for index, image, label in zip(part.indices, *part.data, strict=True)
    ]


def worst(pixels: torch.Tensor, reference: Image.Image) -> int:
    """The largest difference between pixels (3, H, W) and an image's."""
    wanted = torch.from_numpy(np.array(reference)).permute(2, 0, 1).int()
    assert pixels.shape == wanted.shape
    return int((pixels.int() - wanted).abs().max())


def test_the_folders_of_splits_may_have_any_usual_spelling(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name, split in (("Train", "train"), ("validation", "val"), ("TEST", "val")):
        (source / name).symlink_to(folder / split)
    (source / "testing").touch()  # no folder
    assert datasets.find_imagenet(source) == source
    assert cifar10.local_source(str(source)) == source
    for split in ("train", "val"):
        assert open_images(source, split).digest() == open_images(folder, split).digest()
    copy = write.pack(source, tmp_path / "packed", size=48, quality=90, workers=1, say=print)
    for split in ("train", "val"):
        assert copy.splits[split].samples == len(open_images(folder, split))
    (source / "valid").symlink_to(folder / "val")
    with pytest.raises(InputError, match=r"'valid' and 'validation' for the same split: remove"):
        datasets.find_imagenet(source)


def test_a_random_crop_has_the_pixels_of_torchvisions_transform(folder: Path) -> None:
    """With the same random numbers, which are then drawn for mirroring."""
    reference = transforms.RandomResizedCrop(32, (0.08, 1), antialias=True)
    mirrored = set()
    source = open_images(folder, "train")
    torchvision = make_decoder("torchvision")
    for i in range(len(source)):
        torch.manual_seed(i)
        wanted = reference(Image.open(folder / "train" / source.name(i)).convert("RGB"))
        flip = float(torch.rand(())) < 0.5
        mirrored.add(flip)
        if flip:
            wanted = ImageOps.mirror(wanted)
        torch.manual_seed(i)
        crop = decode.random_crop(torchvision, torchvision.decode(source.read(i)), 32, 0.08, True)
        assert worst(torch.from_numpy(crop).permute(2, 0, 1), wanted) <= 1
    assert mirrored == {True, False}
    (part,) = make_loader(source, batch=100).epoch(2)
    images, labels = part.data
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert images.dtype == torch.uint8
    assert labels.dtype == torch.int64


@pytest.mark.parametrize(
    ("size", "resize"),
    [
        (32, 36),
        (48, 64),
        (31, 36),
        (64, 64),
    ],
)
def test_a_centre_has_the_pixels_of_pillow_and_torchvisions_transforms(
    folder: Path, size: int, resize: int
) -> None:
    source = open_images(folder, "val")
    reference = transforms.Compose([transforms.Resize(resize), transforms.CenterCrop(size)])
    batch, labels = centres(source, size, resize)
    assert labels.tolist() == [label for label in range(3) for _ in range(PER_CLASS)]
    for i in range(len(source)):
        whole = Image.open(folder / "val" / source.name(i)).convert("RGB")
        assert worst(batch[i], reference(whole)) <= 1


def test_opencvs_pixels_are_close_to_torchvisions(folder: Path) -> None:
    """Also of images that are not square."""
    cv2 = pytest.importorskip("cv2")
    pytest.importorskip("simplejpeg")
    pixels = np.zeros((40, 20, 3), np.uint8)
    for name in ("torchvision", "opencv"):
        assert decode.make_decoder(name).resize(pixels, 80, 30).shape == (80, 30, 3)
    source = open_images(folder, "val")
    ours, _ = centres(source, 32, 48)
    fast, _ = centres(source, 32, 48, "opencv")
    assert 0 < (ours.int() - fast.int()).abs().float().mean() < 6
    assert cv2.getNumThreads() == 1  # the loader has its own processes


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_exif_orientation_is_applied_as_by_pillow(decoder: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(picture(1), exif=exif, subsampling=0)
    wanted = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    decoded = torch.from_numpy(make_decoder(decoder).decode(data).copy()).permute(2, 0, 1)
    assert worst(decoded, wanted) <= (24 if decoder == "opencv" else 0)


@pytest.mark.parametrize("kind", ["files", "packed"])
def test_samples_do_not_depend_on_ranks_and_workers(
    folder: Path, packed: Path, kind: str, decoder: str
) -> None:
    source = open_images(packed if kind == "packed" else folder, "train")
    alone = sorted(content(make_loader(source, decoder=decoder).epoch(1)))
    assert len(alone) == len(source) == len({sample[2] for sample in alone})
    assert content(make_loader(source, decoder=decoder).epoch(2)) != alone
    for world_size, workers in ((2, 0), (3, 2), (1, 1), (1, 2)):
        make = partial(make_loader, source, decoder=decoder, workers=workers, world_size=world_size)
        ranks = (content(make(rank=rank).epoch(1)) for rank in range(world_size))
        assert sorted(itertools.chain.from_iterable(ranks)) == alone


def test_the_size_depends_on_the_epoch_and_a_rank_may_have_no_sample(folder: Path) -> None:
    source = open_images(folder, "train")
    sized = make_loader(source, size=rising_size, workers=1)
    for epoch, side in ((0, 16), (1, 24)):
        assert next(sized.epoch(epoch)).data[0].shape[2:] == (side, side)
    parts = list(make_loader(source, batch=2, rank=2, world_size=3, workers=2).epoch(0))
    assert len(parts) == len(source) // 2
    for part in parts:
        images, labels = part.data
        assert images.shape == (0, 3, 32, 32)
        assert len(labels) == 0


def test_labels_are_the_folders_and_pieces_keep_them(folder: Path, packed: Path) -> None:
    for path in (folder, packed):
        source = open_images(path, "train")
        assert source.classes == CLASSES
        (part,) = make_loader(source, batch=100).epoch(0)
        assert part.data[1].tolist() == [index // PER_CLASS for index in part.indices.tolist()]
        assert torch.equal(torch.cat([piece.data[0] for piece in part.pieces(3)]), part.data[0])


def test_workers_that_are_not_forked_can_unpickle_the_images(folder: Path, packed: Path) -> None:
    for path in (folder, packed):
        crops = Crops(open_images(path, "train"), "auto", partial(centre_crop, 32, 36))
        image, label = crops[9]
        same, again = pickle.loads(pickle.dumps(crops))[9]
        assert torch.equal(image, same)
        assert label == again


# what it is, and whether Pillow has to read it
ODD: dict[str, tuple[Callable[[Image.Image], bytes], bool]] = {
    "cmyk": (lambda image: encoded(image.convert("CMYK")), False),
    "grey": (lambda image: encoded(image.convert("L")), False),
    "webp": (lambda image: encoded(image, "WEBP"), True),
    "png with alpha": (lambda image: encoded(image.convert("RGBA"), "PNG"), True),
}


@pytest.mark.parametrize("kind", ODD)
def test_images_of_other_formats_are_read(tmp_path: Path, kind: str, decoder: str) -> None:
    make, by_pillow = ODD[kind]
    for i in range(3):
        put(tmp_path / "train" / "a" / f"{i}.JPEG", make(picture(i)))
    source = open_images(tmp_path, "train")
    batch, labels = centres(source, 64, 90, decoder)
    assert labels.tolist() == [0, 0, 0]
    most = 1 if decoder != "opencv" or by_pillow else 48
    for i in range(3):
        whole = Image.open(tmp_path / "train" / "a" / f"{i}.JPEG").convert("RGB")
        assert worst(batch[i], TF.center_crop(whole, [64, 64])) <= most


DAMAGED: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-200]),
    "zeros": lambda path: path.write_bytes(bytes(5000)),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_an_unreadable_image_is_skipped_named_and_counted(
    folder: Path, tmp_path: Path, how: str, decoder: str
) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    source = open_images(tmp_path / "copy", "train")
    bad = 11
    DAMAGED[how](tmp_path / "copy" / "train" / source.name(bad))
    told: list[str] = []
    loader = make_loader(source, decoder=decoder, workers=2, warn=told.append)
    intact = make_loader(open_images(folder, "train"), decoder=decoder)
    good = {sample[2]: sample for sample in content(intact.epoch(0))}
    del good[bad]
    for _ in range(2):
        samples = {sample[2]: sample for sample in content(loader.epoch(0))}
        *_, pixels, label = samples.pop(bad)
        assert label == IGNORE
        assert not any(pixels)
        assert samples == good
    assert len(loader.skipped) == 1
    assert len(told) == 1
    assert loader.skipped_on_all(lambda mine: [mine, b'["another"]', mine]) == 2
    assert source.name(bad) in told[0]
    assert "\n" not in told[0]
    _, labels = centres(source, 32, 36, part=slice(bad - 1, bad + 1))
    assert labels.tolist() == [1, IGNORE]


@pytest.mark.parametrize("every", [50, 200])
def test_more_than_one_percent_unreadable_images_end_the_run(
    monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    source = Fake(3000)
    intact = source.read
    monkeypatch.setattr(source, "read", lambda i: intact(i) if i % every else b"")
    loader = make_loader(source, batch=100)
    if every == 200:
        list(loader.epoch(0))
        assert len(loader.skipped) == 15
    else:
        line = r"^1\d of \d+ samples cannot be read \('dataset=fake/fake sample \d+': is empty\)"
        with pytest.raises(InputError, match=line):
            list(loader.epoch(0))


def test_the_number_of_pixels_is_read_after_other_markers() -> None:
    """A table, a marker without a length and a fill byte; a part of a table looks like a header."""
    size = struct.pack(">HH", 3000, 60_000)
    header = b"\xff\xc0\x00\x0b\x08" + size + bytes(9)
    table = b"\xff\xc4\x00\x0b\xff\xc0" + bytes(7)
    assert decode._announced(b"\xff\xd8" + table + b"\xff\x01" + b"\xff" + header) == 180_000_000


def cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def flip_a_label(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[24 + 16] ^= 1  # to another label that there is
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (
            lambda copy: cut(copy / "train-00001.bin", 1),
            r"train-00001.bin' has \d+ bytes instead of \d+",
        ),
        (
            lambda copy: (copy / "train-00001.bin").unlink(),
            r"train-00001.bin' cannot be read \(No such file",
        ),
        (lambda copy: flip_a_label(copy / "train.index"), r"train.index' is damaged"),
    ],
)
def test_a_damaged_packed_copy_is_found_when_it_is_opened(
    packed: Path, tmp_path: Path, damage: Callable[[Path], object], says: str
) -> None:
    shutil.copytree(packed, tmp_path / "copy")
    damage(tmp_path / "copy")
    with pytest.raises(InputError, match=says) as caught:
        open_images(tmp_path / "copy", "train")
    assert "prepare imagenet" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_truncated_shard_costs_only_its_own_samples(packed: Path, tmp_path: Path) -> None:
    """Bytes that are gone would be a SIGBUS where the file is mapped."""
    shutil.copytree(packed, tmp_path / "copy")
    source = open_images(tmp_path / "copy", "train")
    with open(tmp_path / "copy" / "train-00000.bin", "r+b") as file:
        file.truncate(file.seek(0, 2) - 20_000)
    loader = make_loader(source, batch=100)
    (part,) = loader.epoch(0)
    bad = part.indices[part.data[1] == IGNORE].tolist()
    assert 1 <= len(bad) < 10
    assert len(loader.skipped) == len(bad)


def test_a_folder_without_the_images_is_reported_with_the_fix(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(InputError, match=r"'/no/such/train' cannot be read \(No such file"):
        open_images(Path("/no/such"), "train")
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "val/cat").rename(copy / "val/dog")
    with pytest.raises(InputError, match=r"dog"):
        open_images(copy, "val")
    shutil.rmtree(copy / "val/dog")
    shutil.rmtree(copy / "val/ant")
    val = open_images(copy, "val")
    assert val.classes == CLASSES
    assert {val.label(i) for i in range(len(val))} == {1}
    assert datasets.find_imagenet(copy) == copy
    copy.rename(tmp_path / "imagenet")
    assert datasets.find_imagenet(tmp_path) == tmp_path / "imagenet"


def fake_run(told: list[str]) -> Any:
    """What `open_sets` asks of a run."""

    def together(name: str, work: Callable[[Callable[[object], None]], Any]) -> Any:
        try:
            return work(lambda progress: None)
        except (InputError, MachineError) as error:
            raise type(error)(f"node1: {error}") from None

    world = SimpleNamespace(together=together)
    console = SimpleNamespace(progress=lambda text: None)
    return SimpleNamespace(
        world=world, console=console, say=told.append, warn=told.append, stop=StopFlag()
    )


def keys(dataset: str = "imagenet", data_dir: object = "", stage_dir: str = "") -> dict[str, str]:
    return {"dataset": dataset, "data_dir": str(data_dir), "stage_dir": stage_dir}


def test_stage_dir_takes_variables(
    packed: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NODE_DISK", "~/disk")
    train, val = images.open_sets(fake_run(told), **keys(data_dir=packed, stage_dir="$NODE_DISK"))
    assert train.place == val.place
    assert Path(train.place).parent == tmp_path / "disk"
    assert told[0] == "copying the packed data to stage_dir=$NODE_DISK, unless it is already there"
    assert told[1:] == [
        "24 training images and 24 validation images in 3 classes: "
        f"packed jpeg, 64 px, {train.place}"
    ]
    with pytest.raises(
        InputError, match=r"^node1: stage_dir=\$NO_SUCH_DISK/x: a variable in it is not set"
    ):
        images.open_sets(fake_run(told), **keys(data_dir=packed, stage_dir="$NO_SUCH_DISK/x"))
    with pytest.raises(
        InputError, match=r"^node1: stage_dir= requires a packed copy .*no index\.json.* source=/"
    ):
        images.open_sets(fake_run(told), **keys(data_dir=folder, stage_dir="$NODE_DISK"))
    monkeypatch.setenv("RECIPES_DATA", str(folder))
    assert images.open_sets(fake_run(told), **keys())[1].kind == "files"
    for source in images.open_sets(fake_run(told), **keys("fake")):
        assert len(source.classes) == 1000


def test_a_stop_signal_ends_the_staging(packed: Path, tmp_path: Path) -> None:
    run = fake_run([])
    run.stop.reason = signal.SIGTERM.name
    with pytest.raises(Stopped, match=r"^SIGTERM$"):
        images.open_sets(run, **keys(data_dir=packed, stage_dir=str(tmp_path / "disk")))
    run.stop.reason = ""
    images.open_sets(run, **keys(data_dir=packed, stage_dir=str(tmp_path / "disk")))
    run.stop.reason = signal.SIGTERM.name  # nothing is to be copied, and the step loop is who stops
    images.open_sets(run, **keys(data_dir=packed, stage_dir=str(tmp_path / "disk")))


@pytest.mark.parametrize(
    ("wanted", "allowed", "environ", "workers"),
    [
        (0, 8, {}, 0),
        (5, 8, {}, 5),
        (-1, 8, {}, 3),
        (-1, 8, {"SLURM_CPUS_PER_TASK": "8"}, 7),
        (-1, 64, {"SLURM_CPUS_PER_TASK": "6"}, 5),
        (-1, 1, {}, 1),
        (-1, 256, {}, 16),
    ],
)
def test_a_rank_decodes_with_the_workers_that_its_cpus_allow(
    monkeypatch: pytest.MonkeyPatch,
    wanted: int,
    allowed: int,
    environ: dict[str, str],
    workers: int,
) -> None:
    """Two ranks are on the node."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(allowed)))
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    run: Any = SimpleNamespace(world=SimpleNamespace(ranks=SimpleNamespace(local_world_size=2)))
    assert images.workers(run, wanted) == workers


def test_without_its_libraries_decoder_opencv_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(InputError, match=r"^decoder=opencv: .*cv2.*: pip install '\.\[fast\]'"):
        make_decoder("opencv")


def test_without_torchcodec_the_default_decoder_is_torchvisions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)
    assert make_decoder("auto").name == "torchvision"
    with pytest.raises(
        InputError,
        match=r"^decoder=torchcodec: cannot be loaded .*: pip install 'torchcodec>=0.16'",
    ):
        make_decoder("torchcodec")
