"""Images too many for memory: read from class folders or a packed copy, decoded by threads, a few batches ahead.

What an epoch is made of is drawn from (seed, epoch, batch) for the whole global batch: the same on any number of ranks and
of threads, and after a resume in the middle.
"""

import contextlib
import errno
import hashlib
import io
import math
import mmap
import os
import resource
import struct
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed
from torch import Tensor
from torch.nn import functional

from recipes.core.data import classfolder, download
from recipes.core.data.in_memory import GlobalBatches, Shard, generator, share
from recipes.core.data.packed import packing, staging
from recipes.core.data.packed.packing import Unreadable
from recipes.core.errors import InputError, MachineError, Stopped
from recipes.core.run import watchdog

if TYPE_CHECKING:
    from recipes.core.train.session import Run


IGNORE = -100  # the label of an image that cannot be read: cross_entropy's ignore_index
AUGMENTATION = 1  # the stream of `generator`
RATIOS = (3 / 4, 4 / 3)  # of width to height, of a random crop; these and TRIES as in torchvision's RandomResizedCrop
TRIES = 10
JPEG_START = b"\xff\xd8"
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # of JPEG's markers, those that a size follows
ALONE = frozenset({0x00, 0x01, *range(0xD0, 0xD9), 0xFF})  # and what no length follows
MOST_PIXELS = 178_956_970  # of an image: Pillow's own limit
CHUNK = 16  # images that a thread decodes in one go
AHEAD = 3  # batches that are worked on while one is used
STALL_S = 300.0  # for the images of one chunk
TOLD = 10  # unreadable images that are named; further ones are counted
IN_A_ROW = 10  # unreadable images that end a run where they are read in no order, and
SAMPLES, SHARE = 1000, 0.01  # such a share, of at least so many
MACHINES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # no image's fault
Pixels = npt.NDArray[np.uint8]
Box = tuple[int, int, int, int]  # y, x, height, width


# ---------------------------------------------------------------- sources


class Images(Protocol):
    """A set of images with labels. Files or packed JPEGs are read whole; of packed pixels, the rows that are wanted."""

    kind: str  # for a line: files; packed jpeg, 256 px; packed raw, 256 px
    place: str  # for an error: where it is
    raw: bool

    @property
    def classes(self) -> tuple[str, ...]: ...
    def __len__(self) -> int: ...
    def label(self, i: int) -> int: ...
    def name(self, i: int) -> str: ...
    def digest(self) -> str:
        """The same where the samples and their order are the same."""
        ...

    def read(self, i: int) -> bytes:
        """A compressed image. Raises OSError, Unreadable."""
        ...

    def shape(self, i: int) -> tuple[int, int]:
        """Height and width, where ``raw``."""
        ...

    def rows(self, i: int, first: int, count: int) -> Pixels:
        """Rows of pixels (count, W, 3), where ``raw``; good until this thread asks for others. Raises OSError, Unreadable."""
        ...


class Files:
    """``FOLDER/<class>/*.JPEG``; labels are positions in ``classes``, the training set's."""

    kind, raw = "files", False

    def __init__(self, folder: Path, classes: Sequence[str] | None, tell: Callable[[object], None]) -> None:
        self._listing = classfolder.scan(folder, classes, tell)
        self.place = self._folder = str(folder)

    @property
    def classes(self) -> tuple[str, ...]:
        return self._listing.classes

    def __len__(self) -> int:
        return len(self._listing)

    def label(self, i: int) -> int:
        return self._listing.label(i)

    def name(self, i: int) -> str:
        return self._listing.name(i)

    def digest(self) -> str:
        return self._listing.digest()

    def read(self, i: int) -> bytes:
        with open(f"{self._folder}/{self._listing.name(i)}", "rb", buffering=0) as file:
            return file.readall()

    def shape(self, i: int) -> tuple[int, int]:
        raise NotImplementedError

    def rows(self, i: int, first: int, count: int) -> Pixels:
        raise NotImplementedError


class Packed:
    """A split of a packed copy. Nothing is kept a sample: its record is looked up in the index, which is mapped.

    Shards are read, not mapped: a disk's error is then this sample's and no SIGBUS, what is read at once is what is wanted,
    and pages that were read do not count as the job's memory.
    """

    _RECORD = struct.Struct("<QIIIHH")  # offset, length, shard, label, height, width
    _FIELDS = np.dtype("<u8, <u4, <u4, <u4, <u2, <u2")

    def __init__(self, folder: Path, copy: staging.PackedCopy, split: str) -> None:
        again = staging.prepare_command(folder)
        if split not in copy.splits:
            raise download.DataFileError(f"{str(folder)!r} has no {split}/ in it: pack one that has: {again}")
        found = copy.splits[split]
        for file in found.files:
            there = _file_size(folder / file.name)
            if there != file.size:
                fault = "is missing" if there is None else f"has {there} bytes, index.json says {file.size}"
                raise download.DataFileError(f"{str(folder / file.name)!r} {fault}: {again}")
        if not found.samples:
            raise download.DataFileError(f"{str(folder)!r} has no samples of {split}: {again}")
        self.kind, self.raw = f"packed {copy.encoding}, {copy.size} px", copy.encoding == "raw"
        self.classes, self.place = copy.classes, str(folder)
        self._folder, self._split, self._samples = folder, split, found.samples
        self._files = [file.name for file in found.shards]
        try:
            with open(folder / found.index.name, "rb") as opened:
                self._index = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
        except OSError as error:
            raise download.DataFileError(
                f"{str(folder / found.index.name)!r} cannot be read ({error.strerror}): make it readable"
            ) from None
        self._digest = hashlib.sha256(self._index).hexdigest()
        if self._digest != found.index.sha256 or not self._fits([file.size for file in found.shards]):
            raise download.DataFileError(f"{str(folder / found.index.name)!r} is damaged: {again}")
        self._open: dict[int, int] = {}
        self._opening, self._scratch = threading.Lock(), threading.local()
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # A quarter for each of two sets: the rest of the process wants some too.
        self._most_open = 1 << 20 if soft == resource.RLIM_INFINITY else soft // 4

    def __del__(self) -> None:
        for opened in getattr(self, "_open", {}).values():
            os.close(opened)

    def _fits(self, sizes: list[int]) -> bool:
        """Whether every record is about bytes that are there, and a label that is known."""
        for begin in range(0, self._samples, 1 << 16):  # a piece at a time, so that it takes no memory
            count = min(1 << 16, self._samples - begin)
            part = np.frombuffer(self._index, self._FIELDS, count, begin * self._RECORD.size)
            offset, length, shard, label, height, width = (part[name] for name in self._FIELDS.names or ())
            if (shard >= len(sizes)).any() or (label >= len(self.classes)).any():
                return False
            size = np.asarray(sizes, np.uint64)[shard]
            if (offset > size).any() or (length > size - offset).any():  # a sum could begin again at 0
                return False
            if self.raw and (height.astype(np.int64) * width * 3 != length).any():
                return False
        return True

    def _record(self, i: int) -> tuple[int, int, int, int, int, int]:
        return self._RECORD.unpack_from(self._index, i * 24)

    def __len__(self) -> int:
        return self._samples

    def label(self, i: int) -> int:
        return self._record(i)[3]

    def name(self, i: int) -> str:
        """The name of the file that it was is not kept."""
        return f"{self._split} sample {i} ({self._files[self._record(i)[2]]})"

    def digest(self) -> str:
        return self._digest

    def read(self, i: int) -> bytes:
        offset, length, shard, *_ = self._record(i)
        with self._shard(shard) as opened:
            content = os.pread(opened, length, offset)
        if len(content) != length:
            raise Unreadable("is cut short")
        return content

    def shape(self, i: int) -> tuple[int, int]:
        return self._record(i)[4:]

    def rows(self, i: int, first: int, count: int) -> Pixels:
        offset, _, shard, _, _, width = self._record(i)
        length = count * width * 3
        scratch = getattr(self._scratch, "bytes", b"")
        # One for each thread; as much again would be given out and filled with 0 each time.
        if len(scratch) < length:
            scratch = self._scratch.bytes = bytearray(length)
        with self._shard(shard) as opened:
            if os.preadv(opened, [memoryview(scratch)[:length]], offset + first * width * 3) != length:
                raise Unreadable("is cut short")
        return np.frombuffer(scratch, np.uint8, length).reshape(count, width, 3)

    @contextlib.contextmanager
    def _shard(self, shard: int) -> Iterator[int]:
        """The shard's file, open; one of so many shards that not all can be open at once is opened anew."""
        opened = self._open.get(shard)
        if opened is None:
            opened = self._opened(shard)
        if opened is not None:
            yield opened
            return
        opened = os.open(self._folder / self._files[shard], os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield opened
        finally:
            os.close(opened)

    def _opened(self, shard: int) -> int | None:
        with self._opening:
            if shard not in self._open and len(self._open) < self._most_open:
                self._open[shard] = os.open(self._folder / self._files[shard], os.O_RDONLY | os.O_CLOEXEC)
            return self._open.get(shard)


class Fake:
    """dataset=fake: random pixels, a few of them over and over, that are read and cropped as packed ones are."""

    kind, place, raw = "random pixels, 256 px", "dataset=fake", True

    def __init__(self, samples: int, classes: int = 1000, size: int = 256) -> None:
        self.classes = tuple(f"class {i}" for i in range(classes))
        self._samples = samples
        self._pixels = np.random.default_rng(0).integers(0, 256, (16, size, size, 3), np.uint8)

    def __len__(self) -> int:
        return self._samples

    def label(self, i: int) -> int:
        return i % len(self.classes)

    def name(self, i: int) -> str:
        return f"fake sample {i}"

    def digest(self) -> str:
        return f"{self._samples} fake samples"

    def read(self, i: int) -> bytes:
        raise NotImplementedError

    def shape(self, i: int) -> tuple[int, int]:
        return self._pixels.shape[1], self._pixels.shape[2]

    def rows(self, i: int, first: int, count: int) -> Pixels:
        return self._pixels[i % len(self._pixels), first : first + count]


def _file_size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def open_images(data_dir: str | Path, split: str, tell: Callable[[object], None] = lambda done: None) -> Images:
    """``train`` or ``val`` of a folder: a packed copy, or class folders ``train/<class>/*.JPEG`` and ``val/…``.

    Opens and checks sizes, reads no image. A validation set's labels are positions in its training set's classes. tell: told
    something new now and then, where there is much to list. Raises InputError (one line: file, fault, mend).
    """
    folder = Path(data_dir).expanduser()
    if staging.is_packed(folder):
        return Packed(folder, staging.read_index(folder), split)
    if download.kind(folder / split) != "folder":
        wants = f"{split}/<class>/*.JPEG or a packed copy's index.json"
        mend = "give the folder that holds them, or pack a copy: " + staging.prepare_command(Path("…"))
        raise InputError(f"data_dir={str(data_dir)!r} has no {wants}: {mend}")
    classes = None
    if split != "train" and download.kind(folder / "train") == "folder":
        classes = classfolder.class_names(folder / "train")
    return Files(folder / split, classes, tell)


def open_sets(cfg: "SetKeys", run: "Run") -> tuple[Images, Images]:
    """The training and the validation set of dataset=, data_dir= and stage_dir=, on every rank the same. Says what they are.

    Raises InputError and MachineError, on all ranks where one of them fails.
    """
    if cfg.dataset == "fake":
        return Fake(1_281_167), Fake(2000)
    world = run.world

    def staged(tell: Callable[[object], None]) -> Path:
        folder = find_folder(cfg.data_dir)
        stage_dir = os.path.expanduser(os.path.expandvars(cfg.stage_dir))
        if "$" in stage_dir:
            raise InputError(f"stage_dir={cfg.stage_dir}: such a variable is not set: give a folder")

        def beat(done: int, total: int) -> None:
            if run.stop:
                raise Stopped(run.stop.reason)
            tell(done)
            run.progress(f"to {stage_dir}: {done / 1e9:.1f} of {total / 1e9:.1f} GB")

        return staging.stage(folder, Path(stage_dir), beat) if stage_dir else folder

    if cfg.stage_dir:
        run.say(f"the packed copy is brought to stage_dir={cfg.stage_dir} where it is not there yet")
    # Apart, because what takes long is told while it does, and what a rank finds is looked at when all are there.
    folder = world.together("staging", staged)
    sets = world.together("images", lambda tell: tuple(open_images(folder, split, tell) for split in ("train", "val")))
    train, val = sets
    first = world.broadcast_text("images", f"{train.digest()} {val.digest()}").split(" ")

    def alike(tell: Callable[[object], None]) -> None:
        for images, wanted in zip(sets, first, strict=True):
            if images.digest() != wanted:
                raise InputError(
                    f"{images.place!r} holds other samples here than on {world.hosts[0]}: give all ranks the same"
                )

    world.together("alike", alike)
    run.say(f"{len(train):,} images in {len(train.classes)} classes, {len(val):,} to evaluate: {train.kind}, {folder}")
    return train, val


class SetKeys(Protocol):
    """The keys of a recipe that `open_sets` goes by."""

    @property
    def dataset(self) -> str: ...
    @property
    def data_dir(self) -> str: ...
    @property
    def stage_dir(self) -> str: ...


def find_folder(data_dir: str) -> Path:
    """``data_dir``, or ``imagenet`` in it where that is what holds images; empty for the default, `datafiles.default_dir`."""
    base = Path(data_dir or download.default_dir()).expanduser()
    below = base / "imagenet"

    def has_images(folder: Path) -> bool:
        return staging.is_packed(folder) or download.kind(folder / "train") == "folder"

    return below if not has_images(base) and has_images(below) else base


# ---------------------------------------------------------------- decoding


@dataclass(frozen=True)
class Decoder:
    """decode: a JPEG to upright RGB pixels (H, W, 3); raises RuntimeError or ValueError for what it does not read.

    resize: pixels brought to the size of its second argument, and written there.
    """

    name: str
    decode: Callable[[bytes], Pixels]
    resize: Callable[[Pixels, Pixels], None]


def make_decoder(name: str) -> Decoder:
    """torchvision: the pixels of Pillow and torchvision's transforms, to a unit. opencv: faster, other pixels.

    The other pixels are OpenCV's bilinear ones, which are not antialiased, of a faster and coarser inverse DCT. Raises
    InputError where a library is missing.
    """
    return _opencv() if name == "opencv" else _torchvision()


def _torchvision() -> Decoder:
    import torchvision.io  # registers the operator

    assert torchvision.io
    try:
        # What torchvision.io.decode_jpeg calls; that itself warns at each call from 0.29 on, and does not know of threads.
        decode_jpeg = torch.ops.image.decode_jpeg
    except AttributeError:
        raise InputError(
            "decoder=torchvision: this torchvision decodes no JPEGs: pip install 'torchvision<0.30', or give decoder=opencv"
        ) from None

    def decode(data: bytes) -> Pixels:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return decode_jpeg(tensor, 3, True).permute(1, 2, 0).numpy()  # 3: RGB; True: EXIF's orientation

    def resize(pixels: Pixels, out: Pixels) -> None:
        # In one piece: torch would copy it into one with threads of its own, as many again for each of ours. Writable: else it warns.
        source = torch.from_numpy(np.require(pixels, None, ["C", "W"])).permute(2, 0, 1)[None]
        done = functional.interpolate(source, size=out.shape[:2], mode="bilinear", antialias=True)
        out[...] = done[0].permute(1, 2, 0).numpy()

    return Decoder("torchvision", decode, resize)


def _opencv() -> Decoder:
    try:
        import cv2
        import simplejpeg
    except ImportError:
        raise InputError(
            "decoder=opencv: wants opencv-python-headless and simplejpeg: pip install opencv-python-headless simplejpeg, "
            "or make install"
        ) from None
    cv2.setNumThreads(1)  # one image is too little to share; the loader's threads are what runs side by side
    decode_jpeg, cv2_resize, linear = simplejpeg.decode_jpeg, cv2.resize, cv2.INTER_LINEAR

    def decode(data: bytes) -> Pixels:
        pixels = decode_jpeg(data, fastdct=True, fastupsample=True)
        return _upright(pixels, data) if b"Exif" in data[:4096] else pixels

    def resize(pixels: Pixels, out: Pixels) -> None:
        cv2_resize(pixels, (out.shape[1], out.shape[0]), out, interpolation=linear)

    return Decoder("opencv", decode, resize)


def _upright(pixels: Pixels, data: bytes) -> Pixels:
    """Turned and mirrored as EXIF's orientation wants it."""
    from PIL import Image

    try:
        orientation = Image.open(io.BytesIO(data)).getexif().get(0x0112, 1)
    except Exception:  # damaged EXIF data: the pixels are good all the same
        return pixels
    if orientation in (5, 6, 7, 8):
        pixels = pixels.transpose(1, 0, 2)
    down, right = orientation in (3, 4, 7, 8), orientation in (2, 3, 6, 7)
    return np.ascontiguousarray(pixels[:: -1 if down else 1, :: -1 if right else 1])


def _pillow(data: bytes) -> tuple[Pixels, str]:
    """What Pillow makes of an image, converted as `packing` does, and what is odd about it. Raises Unreadable."""
    content, height, width, kinds = packing.encode(data, "raw", 1 << 30, 0)
    return np.frombuffer(content, np.uint8).reshape(height, width, 3), ", ".join(kinds)


# ---------------------------------------------------------------- crops


def random_box(uniform: Sequence[float], height: int, width: int, least: float) -> Box:
    """torchvision's RandomResizedCrop from uniform numbers: two for each of its tries, and two for the place.

    least: the smallest share of the area. Where no try fits, the largest middle part whose ratio is allowed.
    """
    area, low, span = height * width, math.log(RATIOS[0]), math.log(RATIOS[1] / RATIOS[0])
    for i in range(0, 2 * TRIES, 2):
        target = area * (least + (1 - least) * uniform[i])
        ratio = math.exp(low + span * uniform[i + 1])
        w, h = round(math.sqrt(target * ratio)), round(math.sqrt(target / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(uniform[2 * TRIES] * (height - h + 1)), int(uniform[2 * TRIES + 1] * (width - w + 1)), h, w
    h, w = height, width
    if width < RATIOS[0] * height:
        h = min(height, round(width / RATIOS[0]))
    elif width > RATIOS[1] * height:
        w = min(width, round(height * RATIOS[1]))
    return (height - h) // 2, (width - w) // 2, h, w


def resized(height: int, width: int, shorter: int) -> tuple[int, int]:
    """Height and width of an image whose shorter side becomes ``shorter``: torchvision's Resize."""
    if height <= width:
        return shorter, int(shorter * width / height)
    return int(shorter * height / width), shorter


class RandomCrop:
    """A box of each image, drawn for the whole global batch. Row i of ``uniform``: `random_box`'s numbers for sample i."""

    def __init__(self, uniform: Tensor, least: float) -> None:
        self._uniform, self._least = uniform.tolist(), least

    def __call__(self, images: Images, decoder: Decoder, sample: int, i: int, out: Pixels) -> str:
        uniform, least = self._uniform[i], self._least
        if images.raw:
            y, x, h, w = random_box(uniform, *images.shape(sample), least)
            decoder.resize(images.rows(sample, y, h)[:, x : x + w], out)
            return ""
        pixels, odd = _decoded(decoder, images.read(sample))
        y, x, h, w = random_box(uniform, pixels.shape[0], pixels.shape[1], least)
        decoder.resize(pixels[y : y + h, x : x + w], out)
        return odd


class CentreCrop:
    """The middle of each image whose shorter side is brought to ``shorter`` before: torchvision's Resize and CenterCrop."""

    def __init__(self, shorter: int) -> None:
        self._shorter = shorter

    def __call__(self, images: Images, decoder: Decoder, sample: int, i: int, out: Pixels) -> str:
        if images.raw:
            pixels, odd = images.rows(sample, 0, images.shape(sample)[0]), ""
        else:
            pixels, odd = _decoded(decoder, images.read(sample))
        height, width = resized(pixels.shape[0], pixels.shape[1], self._shorter)
        if height * width > MOST_PIXELS:
            raise Unreadable(f"is {pixels.shape[1]} x {pixels.shape[0]} pixels: too long for its width")
        if (height, width) != pixels.shape[:2]:
            whole = np.empty((height, width, 3), np.uint8)
            decoder.resize(pixels, whole)
            pixels = whole
        # round() as torchvision's center_crop has it: of two middles, the even one
        y, x = round((height - out.shape[0]) / 2), round((width - out.shape[1]) / 2)
        out[...] = pixels[y : y + out.shape[0], x : x + out.shape[1]]
        return odd


def _decoded(decoder: Decoder, data: bytes) -> tuple[Pixels, str]:
    """Pixels, and what is odd about an image that the decoder does not read and Pillow does. Raises Unreadable."""
    try:
        if data[:2] != JPEG_START:
            raise ValueError("no JPEG")
        if _announced(data) > MOST_PIXELS:
            raise Unreadable("has more than 178 million pixels")
        return decoder.decode(data), ""
    except (RuntimeError, ValueError) as error:
        pixels, kinds = _pillow(data)
        return pixels, kinds or f"{type(error).__name__}: {error}".splitlines()[0][:80]


def _announced(data: bytes) -> int:
    """The pixels that a JPEG's header announces, for which a decoder takes memory before it looks further; 0 where it has none."""
    at = data.find(b"\xff", 2)
    while 0 <= at <= len(data) - 9:
        if data[at + 1] in FRAMES:
            return int.from_bytes(data[at + 5 : at + 7], "big") * int.from_bytes(data[at + 7 : at + 9], "big")
        at += 1 if data[at + 1] in ALONE else 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        at = data.find(b"\xff", at)
    return 0


Crop = Callable[[Images, Decoder, int, int, Pixels], str]


# ---------------------------------------------------------------- batches


@dataclass(frozen=True)
class LoadedShard(Shard):
    """A shard with its images, all on the rank's device.

    images: uint8 (b, 3, S, S), in channels_last. labels: int64 (b,), IGNORE where the image cannot be read, which is 0 then.
    flip: bool (b,), which of them are to be mirrored.
    """

    images: Tensor
    labels: Tensor
    flip: Tensor


class Loader:
    """`data.GlobalBatches` with the images, cropped at random. Where workers is 0, they are decoded when they are asked for.

    size: pixels of a side, by epoch. min_crop: the least share of an image's area that a crop has. workers: threads; the
    decoders leave the interpreter's lock, so that they run side by side. warn: told what cannot be read.
    """

    def __init__(
        self,
        images: Images,
        batches: GlobalBatches,
        *,
        size: Callable[[int], int],
        decoder: str,
        workers: int,
        device: torch.device,
        warn: Callable[[str], None],
        min_crop: float = 0.08,
    ) -> None:
        assert len(images) == batches.num_samples
        self._images, self._batches, self._size, self._min_crop = images, batches, size, min_crop
        self._decoder, self._workers, self._warn = make_decoder(decoder), workers, warn
        self._to = _Mover(device)
        self._tally = _Tally(images, self._decoder.name, warn, IN_A_ROW)
        self._centre_tallies: dict[int, _Tally] = {}
        self.num_samples = batches.num_samples
        self.global_batch_size = batches.global_batch_size
        self.seed, self.data = batches.seed, batches.data
        self.per_epoch = batches.per_epoch

    @property
    def skipped(self) -> int:
        """How many samples of this rank could not be read so far, each counted once."""
        return sum(len(tally.skipped) for tally in self._tallies())

    @property
    def by_pillow(self) -> int:
        """How many images of this rank Pillow has read, because the decoder does not."""
        return sum(tally.by_pillow for tally in self._tallies())

    def skipped_on_all(self) -> int:
        """How many samples could not be read on any rank, each counted once; every rank has to call it."""
        found: list[list[set[int]]] = [[]] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(found, [tally.skipped for tally in self._tallies()])
        return sum(len(set().union(*of_one_set)) for of_one_set in zip(*found, strict=True))

    def _tallies(self) -> "list[_Tally]":
        return [self._tally, *self._centre_tallies.values()]

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[LoadedShard]:
        """This rank's shards of ``epoch``, from batch ``first_batch`` on.

        A generator that is closed leaves no thread. Raises InputError where too much cannot be read, MachineError where a
        read does not come back.
        """
        size = self._size(epoch)

        def jobs() -> Iterator[_Job]:
            for shard in self._batches.epoch(epoch, first_batch):
                random = generator(self.seed, epoch, AUGMENTATION, shard.batch)
                uniform = torch.rand(shard.global_size, 2 * TRIES + 3, dtype=torch.float64, generator=random)
                mine = uniform[share(shard.global_size, self._batches.rank, self._batches.world_size)]
                crop = RandomCrop(mine, self._min_crop)
                samples = shard.indices.tolist()
                yield _Job(
                    self._images,
                    self._decoder,
                    crop,
                    samples,
                    self._to.empty(len(samples), size),
                    shard,
                    mine[:, -1] < 0.5,
                )

        with contextlib.closing(_worked(jobs(), self._workers)) as finished:
            for job in finished:
                shard = job.shard
                assert shard is not None and job.flip is not None
                yield LoadedShard(
                    shard.epoch, shard.batch, shard.indices, shard.global_size,
                    self._to(job.images), self._to(self._tally.labels(job)), self._to(job.flip),
                )  # fmt: skip

    def centres(
        self, images: Images, part: slice, size: int, resize: int, batch_size: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The middle, ``size`` pixels of a shorter side of ``resize``, of the images of ``part``, in order.

        Images and labels, as `LoadedShard` has them, on the rank's device. Raises as `epoch` does.
        """
        crop, samples = CentreCrop(resize), range(len(images))[part]
        tally = self._centre_tallies.setdefault(id(images), _Tally(images, self._decoder.name, self._warn))

        def jobs() -> Iterator[_Job]:
            for begin in range(0, len(samples), batch_size):
                some = list(samples[begin : begin + batch_size])
                yield _Job(images, self._decoder, crop, some, self._to.empty(len(some), size))

        with contextlib.closing(_worked(jobs(), self._workers)) as finished:
            for job in finished:
                yield self._to(job.images), self._to(tally.labels(job))


@dataclass
class _Job:
    """One rank's part of a batch, to be decoded into ``host``, uint8 (b, S, S, 3). bad, odd: why, by position in the batch."""

    source: Images
    decoder: Decoder
    crop: Crop
    samples: list[int]
    host: Tensor
    shard: Shard | None = None
    flip: Tensor | None = None
    bad: dict[int, str] = field(default_factory=dict)
    odd: dict[int, str] = field(default_factory=dict)
    at: dict[int, int] = field(default_factory=dict)  # by chunk, where it is

    @property
    def images(self) -> Tensor:
        return self.host.permute(0, 3, 1, 2)

    def run(self, begin: int, end: int) -> None:
        """Decodes a chunk. What cannot be read is black and noted."""
        out, samples, crop = self.host.numpy(), self.samples, self.crop
        for i in range(begin, end):
            self.at[begin] = i
            try:
                if odd := crop(self.source, self.decoder, samples[i], i, out[i]):
                    self.odd[i] = odd
            except (OSError, Unreadable) as error:
                if isinstance(error, OSError) and error.errno in MACHINES:
                    name = self.source.name(samples[i])
                    raise MachineError(
                        f"{self.source.place!r}: {name!r} cannot be read ({error.strerror}): "
                        "look at this machine's memory and ulimit -n"
                    ) from None
                out[i] = 0
                self.bad[i] = (error.strerror if isinstance(error, OSError) else None) or str(error)


def _worked(jobs: Iterable[_Job], workers: int) -> Generator[_Job, None, None]:
    """The jobs, done, in their order; with workers, some of them ahead."""
    if not workers:
        for job in jobs:
            job.run(0, len(job.samples))
            yield job
        return
    pool = ThreadPoolExecutor(workers, "images")
    waiting: deque[tuple[_Job, dict[int, Future[None]]]] = deque()
    hung = False
    try:
        for job in jobs:
            count = len(job.samples)
            chunk = max(1, min(CHUNK, -(-count // workers)))
            chunks = range(0, count, chunk)
            waiting.append((job, {begin: pool.submit(job.run, begin, min(begin + chunk, count)) for begin in chunks}))
            if len(waiting) > max(AHEAD, 2 * workers // max(1, count)):
                yield _finished(*waiting.popleft())
        while waiting:
            yield _finished(*waiting.popleft())
    except MachineError:
        hung = True
        raise
    finally:
        pool.shutdown(wait=not hung, cancel_futures=True)


def _finished(job: _Job, chunks: dict[int, "Future[None]"]) -> _Job:
    """chunks: by where they begin."""
    for begin, chunk in chunks.items():
        clock = watchdog.RunningClock()
        end = clock.now() + STALL_S
        while not wait([chunk], watchdog.POLL_S).done and clock.now() < end:
            pass
        try:
            chunk.result(0)
        except FutureTimeout:
            name = job.source.name(job.samples[job.at.get(begin, begin)])
            raise MachineError(
                f"{job.source.place!r}: reading has not come back in {STALL_S:g} s, near {name!r}: look at its file system"
            ) from None
    return job


class _Tally:
    """Counts what of a set cannot be read, or not by the decoder, and says so; labels of a batch are made beside it.

    in_a_row: so many that cannot be read end the run; None where neighbours in the set are read one after the other.
    """

    def __init__(self, images: Images, decoder: str, warn: Callable[[str], None], in_a_row: int | None = None) -> None:
        self._images, self._decoder, self._warn, self._most_in_a_row = images, decoder, warn, in_a_row
        self._seen = self._bad = self._in_a_row = 0
        self.skipped: set[int] = set()
        self.by_pillow = 0

    def labels(self, job: _Job) -> Tensor:
        """int64 (b,), IGNORE where a sample could not be read. Raises InputError where that are too many."""
        labels = torch.tensor([self._images.label(sample) for sample in job.samples], dtype=torch.int64)
        for i in job.bad:
            labels[i] = IGNORE
        for i in sorted(job.odd):
            self._tell_odd(job.samples[i], job.odd[i])
        if not job.bad:
            self._in_a_row = 0 if job.samples else self._in_a_row
            self._seen += len(job.samples)
            return labels
        for i, sample in enumerate(job.samples):
            self._seen += 1
            self._in_a_row = self._in_a_row + 1 if i in job.bad else 0
            if i in job.bad:
                self._note(sample, job.bad[i])
        return labels

    def _tell_odd(self, sample: int, odd: str) -> None:
        self.by_pillow += 1
        if self.by_pillow == 1:
            name = self._images.name(sample)
            self._warn(
                f"{name!r} is read by Pillow ({odd}), as all that decoder={self._decoder} cannot read: slower; told once"
            )

    def _note(self, sample: int, reason: str) -> None:
        self._bad += 1
        name = self._images.name(sample)
        if sample not in self.skipped:
            self.skipped.add(sample)
            if len(self.skipped) <= TOLD:
                last = "; further ones are counted only" if len(self.skipped) == TOLD else ""
                self._warn(f"{name!r} cannot be read ({reason}) and is left out{last}")
        too_many = self._seen >= SAMPLES and self._bad > SHARE * self._seen
        if too_many or self._in_a_row == self._most_in_a_row:
            many = f"{self._bad} of {self._seen} images" if too_many else f"{self._in_a_row} images in a row"
            raise InputError(
                f"data_dir: {many} of {self._images.place!r} cannot be read (the last: {name!r}: {reason}): "
                "see that it is there and whole"
            )


class _Mover:
    """Brings a batch's tensors to the device: to a GPU from pinned memory, on a stream of its own, beside what runs there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def empty(self, count: int, size: int) -> Tensor:
        shape = (count, size, size, 3)
        if self._stream is None:
            return torch.from_numpy(np.empty(shape, np.uint8))  # NumPy asks for huge pages: far fewer faults
        # Pinned memory comes from torch's cache, which gives a block out again when its copy has been made.
        return torch.empty(shape, dtype=torch.uint8, pin_memory=True)

    def __call__(self, tensor: Tensor) -> Tensor:
        if self._stream is None:
            return tensor.to(self._device)
        with torch.cuda.stream(self._stream):
            moved = (tensor if tensor.is_pinned() else tensor.pin_memory()).to(self._device, non_blocking=True)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        moved.record_stream(current)
        return moved
