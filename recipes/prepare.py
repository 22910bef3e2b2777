"""Fetch, verify and unpack or pack a dataset; run it on a login node, since compute nodes often have no internet.

    python -m recipes.prepare mnist data_dir=DIR [source=FOLDER_OR_URL]
    python -m recipes.prepare cifar10 data_dir=DIR [source=FOLDER_OR_URL]
    python -m recipes.prepare imagenet data_dir=PACKED source=FOLDER [encoding=raw] [size=256] [workers=N] …
    python -m recipes.prepare weights arch=resnet50            # what pretrained= begins with, into $TORCH_HOME

Exit status: 0 done; 2 bad arguments or a damaged source; 3 cannot be done on this machine (offline, disk); 130 Ctrl-C.
"""

import contextlib
import dataclasses
import functools
import hashlib
import http.client
import io
import os
import pickle
import shlex
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import IO, Any

from recipes.core.data.packed import write
from recipes.core.data.packed.workers import Progress
from recipes.core.data.packed import format
from recipes.core.data import pillow
from recipes.core.data.pillow import Unreadable
from recipes.core.data import datasets
from recipes.core import files
from recipes.core import errors
from recipes.core.config import parser
from recipes.core.data import classfolder, download
from recipes.core.data.classfolder import Listing
from recipes.core.config.parser import key
from recipes.core.data.download import FetchError
from recipes.core.files import size_text
from recipes.core.data.datasets import CIFAR10, CIFAR10_CLASSES, CIFAR10_IDX, DataFile, DataFileError, Dataset
from recipes.core.errors import ConfigError, InputError, MachineError
from recipes.core.data.packed.format import PackOptions

USAGE = """\
usage: python -m recipes.prepare DATASET [key=value …]

{datasets}

Run it where there is internet, usually a login node; imagenet is packed wherever its images are, and wants CPUs.
HTTPS_PROXY, SSL_CERT_FILE and SSL_CERT_DIR are honoured.
"""


@dataclass(frozen=True)
class PrepareKeys:
    data_dir: str = key("", "where the data goes; default: $RECIPES_DATA, else data/")
    source: str = key("", "a folder that has the files already, or a mirror's base URL; default: the public mirrors")

    def __post_init__(self) -> None:
        parser.check(self)


class Encoding(Enum):
    jpeg = "jpeg"
    raw = "raw"


@dataclass(frozen=True)
class ImagenetKeys:
    data_dir: str = key("", "where the packed copy goes: a folder of its own")
    source: str = key("", "the folder with train/<wnid>/*.JPEG and val/<wnid>/*.JPEG")
    encoding: Encoding = key(
        Encoding.jpeg, "jpeg; raw: pixels, about 8 times the room, and no decoding when it is read"
    )
    size: int = key(256, "pixels of the shorter side; smaller images stay as they are", low=16, high=4096)
    quality: int = key(90, "of the JPEGs that are written", low=1, high=100)
    workers: int = key(0, "processes; 0: all CPUs that this one may use", low=0, high=4096)
    max_skipped: int | None = key(
        None, "unreadable images of a split that are let pass; default: 1 %, at least 10", low=0
    )
    samples_per_shard: int = key(2048, "images of one file", low=1, high=1_000_000)

    def __post_init__(self) -> None:
        parser.check(self)


@dataclass(frozen=True)
class WeightsKeys:
    arch: str = key("resnet50", "a classifier of torchvision's", pattern=r"[a-z][a-z0-9_]{0,63}", form="a model's name")
    weights: str = key(
        "true", "their name, such as IMAGENET1K_V1; true: the newest", pattern=parser.NAME, form=parser.NAME_FORM
    )

    def __post_init__(self) -> None:
        parser.check(self)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: sys.argv's); returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or {"-h", "--help", "help"} & set(arguments):
        errors.show(USAGE.format(datasets="\n".join(map(_help, DATASETS))).rstrip("\n"))
        return 0
    try:
        name, keys = parse(arguments)
        DATASETS[name](keys)
    except (ConfigError, InputError) as err:
        return _fail(str(err), errors.EXIT_CONFIG)
    except MachineError as err:
        return _fail(str(err), errors.EXIT_MACHINE)
    except KeyboardInterrupt:
        return _fail("interrupted; nothing half-written is left, the same command goes on", 130)
    return 0


def _fail(message: str, status: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return status


def _help(dataset: str) -> str:
    fields = dataclasses.fields(KEYS.get(dataset, PrepareKeys))
    lines = []
    for field in fields:
        default = field.default.name if isinstance(field.default, Enum) else field.default
        shown = "" if default in ("", None) else f" (default {default})"
        lines.append(f"    {field.name + '=':<19}{field.metadata['help']}{shown}")
    return "\n".join([f"  {dataset}", *lines])


def parse(argv: Sequence[str]) -> tuple[str, Any]:
    """The dataset's name and the keys. Raises ConfigError."""
    names = [word for word in argv if "=" not in word]
    if len(names) != 1:
        got = " ".join(repr(name[: errors.MAX_SHOWN]) for name in names[:4]) or "none"
        raise ConfigError(f"one dataset is wanted ({', '.join(DATASETS)}), got {got}")
    if names[0] not in DATASETS:
        raise ConfigError(
            f"unknown dataset {names[0][: errors.MAX_SHOWN]!r}: wants one of {', '.join(DATASETS)}{parser.nearest(names[0], DATASETS)}"
        )
    return names[0], parser.parse_keys(KEYS.get(names[0], PrepareKeys), [word for word in argv if "=" in word])


def prepare_files(dataset: Dataset, keys: PrepareKeys) -> None:
    """Have all of the dataset's files below data_dir, unpacked and verified. Raises InputError, MachineError."""
    data_dir = Path(keys.data_dir or datasets.default_dir()).expanduser().absolute()
    _check_source(keys.source)
    folder = data_dir / dataset.folder
    wanted = [file for file in dataset.files if not _is_there(folder / file.name, file)]
    need = sum(file.size for file in wanted)
    try:
        download.remove_stale(folder, dataset)
        if wanted:
            folder.mkdir(parents=True, exist_ok=True)
            download.check_room(folder, need)
        mirrors = list(dataset.mirrors)
        for file in wanted:
            place = _fetch(file, _places(dataset, file, data_dir, keys.source, mirrors), folder, bool(keys.source))
            mirrors.sort(key=lambda mirror: not place.startswith(mirror))  # the one that worked comes first
    except OSError as err:
        raise MachineError(download.disk_words(err, folder, need)) from err
    _say(f"{dataset.name} is in {folder}")
    _say(f"next: python -m recipes.{dataset.recipe} data_dir={shlex.quote(str(data_dir))}")


def _is_there(path: Path, file: DataFile) -> bool:
    fault = datasets.fault_of(path, file)
    if fault is None:
        _say(f"{file.name}: already there, verified")
    elif os.path.lexists(path):
        _say(f"{path} {fault}: it is replaced as soon as a good copy is here")
    return fault is None


def _check_source(source: str) -> None:
    if "://" in source:
        if fault := download.check_url(source):
            shown = repr(source) if "@" not in source and "?" not in source else "the URL"
            raise InputError(f"source={shown} {fault}")
    elif source and datasets.kind(Path(source).expanduser(), "source") != "folder":
        raise InputError(f"source={source!r} is no folder: give one that has the files, or a base URL https://…/")


def _places(dataset: Dataset, file: DataFile, data_dir: Path, source: str, mirrors: list[str]) -> list[str]:
    """Where to look for the file, in turn: URLs and paths."""
    if "://" in source:
        return [f"{source.rstrip('/')}/{file.served_name}"]
    if source:
        paths = datasets.local_copies(source, dataset, file, "source")
        if not paths:
            folders = ", ".join(str(folder) for folder in datasets.search_folders(source, dataset))
            raise InputError(f"source={source!r} has no {file.name}, plain or .gz (looked in {folders})")
        return [str(path) for path in paths]
    # A good copy that somebody has carried here saves the download; what lies at the file's own place is known as bad.
    own = data_dir / dataset.folder / file.name
    carried = [str(path) for path in datasets.local_copies(data_dir, dataset, file) if path != own]
    return carried + [f"{mirror}{file.served_name}" for mirror in mirrors]


def _fetch(file: DataFile, places: list[str], folder: Path, source_given: bool) -> str:
    """Install the file from the first place that has it whole, and return that place."""
    reasons = []
    all_damaged = True
    for place in places:
        try:
            _say(f"{file.name}: from {place}")
            download.install(place, file, folder, functools.partial(_show_progress, file))
            _say(f"{file.name}: verified, {size_text(file.size)}")
            return place
        except (DataFileError, FetchError) as err:
            reasons.append(f"{place}: {err}")
            if len(reasons) < len(places):
                _say(f"{file.name}: {err}; trying the next")
            all_damaged = all_damaged and isinstance(err, DataFileError)
    tried = "; ".join(reasons)
    if source_given and all_damaged:
        raise InputError(f"source= has no good copy of {file.name} ({tried}): take another source=")
    raise MachineError(
        f"no good copy of {file.name} could be fetched ({tried}): run this where there is internet (a login node), "
        "set HTTPS_PROXY if the site has a proxy, or give source= a folder that has the files"
    )


# ---------------------------------------------------------------- CIFAR-10

BATCH_IMAGES = 10_000
IMAGE_BYTES = 3 * 32 * 32
TRAIN_BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5")
# torchvision 0.30's (datasets/cifar.py). An MD5 can be forged, so the batches are not trusted for it: see _BatchUnpickler.
PICKLE_MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
CIFAR10_SOURCES = (
    "cifar-10-batches-bin/, cifar-10-binary.tar.gz, cifar-10-batches-py/, or train/<class>/*.jpg and test/<class>/…"
)
Chunks = Iterable[tuple[bytes, bytes]]  # labels, and as many images of 3072 bytes: red, green and blue plane


@dataclass
class _Counts:
    """What became of the images of a class folder."""

    skipped: list[dict[str, str]] = dataclasses.field(default_factory=list)
    resized: int = 0


def prepare_cifar10(keys: PrepareKeys) -> None:
    """Have CIFAR-10 as IDX files, and index.json, in data_dir/cifar10. Raises InputError, MachineError."""
    data_dir = Path(keys.data_dir or datasets.default_dir()).expanduser().absolute()
    folder = data_dir / CIFAR10.folder
    need = 6 * BATCH_IMAGES * (IMAGE_BYTES + 1)
    try:
        if not _cifar10_is_there(folder, keys.source):
            sources = _cifar10_sources(keys.source, data_dir)
            need += CIFAR10.files[0].size if "://" in sources[-1] else 0
            folder.mkdir(parents=True, exist_ok=True)
            with write.exclusive(folder / "prepare.lock", _say):
                write.sweep(folder)
                download.remove_stale(folder, CIFAR10)
                download.check_room(folder, need)
                _make_cifar10(folder, sources, keys.source)
    except OSError as err:
        raise MachineError(download.disk_words(err, folder, need)) from err
    _say(f"cifar10 is in {folder}")
    _say(f"next: python -m recipes.{CIFAR10.recipe} data_dir={shlex.quote(str(data_dir))}")


def _cifar10_is_there(folder: Path, source: str) -> bool:
    """Whether it is there, and whole. Raises InputError where it was made of something else than is wanted."""
    index = files.read_json(folder / "index.json") or {}
    known = index.get("sha256")
    if not isinstance(known, dict):
        return False
    for name in CIFAR10_IDX:
        try:
            found = _sha256(folder / name)
        except OSError:
            found = ""
        if found != known.get(name):
            _say(f"{folder / name} is missing or damaged: all are made anew")
            return False
    made_of, samples, classes = str(index.get("source")), index.get("samples") or {}, index.get("classes") or []
    holds = f"{samples.get('train')} training and {samples.get('test')} test images, {len(classes)} classes"
    if source:
        given = source.rstrip("/") if "://" in source else str(Path(source).expanduser().absolute())
        as_wanted, wanted = made_of == given or made_of.startswith(os.path.join(given, "")), "the given source="
    else:
        own = {"train": len(TRAIN_BATCHES) * BATCH_IMAGES, "test": BATCH_IMAGES}
        as_wanted, wanted = (samples, classes) == (own, list(CIFAR10_CLASSES)), "CIFAR-10's own images"
    if not as_wanted:
        raise InputError(
            f"data_dir={str(folder.parent)!r}: its cifar10/ was made from {_plain(made_of)} ({holds}), not from {wanted}: "
            f"give that as source= to keep it, or another data_dir=, or remove {shlex.quote(str(folder))}"
        )
    _say(f"cifar10: already there, verified: {holds}, from {_plain(made_of)}")
    return True


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(datasets.CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _cifar10_sources(source: str, data_dir: Path) -> list[str]:
    """Where to take it from, in turn: exact copies, then class folders, then URLs. Raises InputError."""
    packed = CIFAR10.files[0]
    if "://" in source:
        _check_source(source)
        return [f"{source.rstrip('/')}/{packed.served_name}"]
    given = Path(source).expanduser().absolute() if source else None
    kind = functools.partial(datasets.kind, key="source" if given else "data_dir")
    if given and kind(given) == "file":
        return [str(given)]
    found: list[str] = []
    for root in [given] if given else [data_dir, data_dir / CIFAR10.folder]:
        folders = [root / "cifar-10-batches-bin", root / "cifar-10-batches-py", root]
        found += [str(f) for f in folders if _is_batches(f, ".bin", kind) or _is_batches(f, "", kind)]
        found += [str(root / packed.name)] if kind(root / packed.name) == "file" else []
        if given and kind(root / "train") == kind(root / "test") == "folder":
            found.append(str(root))
    if given and not found:
        raise InputError(f"source={source!r} is no copy of CIFAR-10: give a folder that has {CIFAR10_SOURCES}")
    return list(dict.fromkeys(found)) + ([] if given else [f"{m}{packed.served_name}" for m in CIFAR10.mirrors])


def _is_batches(folder: Path, ending: str, kind: Callable[[Path], str] = datasets.kind) -> bool:
    return all(kind(folder / f"{name}{ending}") == "file" for name in (*TRAIN_BATCHES, "test_batch"))


def _make_cifar10(folder: Path, sources: list[str], given: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        (folder / "index.json").unlink()  # so that what is half made does not look whole
    for place in sources:
        try:
            _say(f"cifar10: from {_plain(place)}")
            return _convert_cifar10(folder, place, given)
        except DataFileError as err:
            if place == sources[-1]:
                raise InputError(f"source={given or place!r}: {err}; take another source=") from None
            _say(f"cifar10: {_plain(place)}: {_plain(str(err))}; trying the next")


def _convert_cifar10(folder: Path, place: str, given: str) -> None:
    """Write the four files and index.json from one source. Raises DataFileError when that is damaged."""
    packed = CIFAR10.files[0]
    path, counts = Path(place), _Counts()
    classes: tuple[str, ...] = CIFAR10_CLASSES
    with contextlib.ExitStack() as stack:
        if "://" in place:
            path = folder / packed.name
            if not os.path.lexists(path):  # else it is the user's own
                stack.callback(path.unlink, missing_ok=True)
            _fetch(packed, [place], folder, bool(given))
        if path.is_file():
            chunks = _from_tar(path, stack)
        elif _is_batches(path, ".bin"):
            chunks = _from_batches(functools.partial(_read_binary, path))
        elif _is_batches(path, ""):
            chunks = _from_batches(functools.partial(_read_pickle, path))
        else:
            train = classfolder.scan(path / "train")
            listings = {"train": train, "test": classfolder.scan(path / "test", train.classes)}
            if len(train.classes) > len(CIFAR10_CLASSES):
                raise InputError(f"source={given!r}: {len(train.classes)} classes in train/, CIFAR-10 has ten")
            classes = train.classes
            chunks = {split: _from_listing(split, listing, counts) for split, listing in listings.items()}
        samples = {split: _write_idx(folder, split, chunks[split]) for split in ("train", "test")}
    if not all(samples.values()):
        raise InputError(f"source={given!r}: no image can be read; take another source=")
    index = {
        "classes": classes,
        "source": place,
        "samples": samples,
        "sha256": {name: _sha256(folder / name) for name in CIFAR10_IDX},
        "skipped": counts.skipped,
        "resized": counts.resized,
    }
    files.write_json(folder / "index.json", index)
    _say(f"cifar10: {samples['train']} training and {samples['test']} test images, {len(classes)} classes")
    if counts.resized:
        _say(f"cifar10: {counts.resized} images were brought to 32 x 32 pixels")
    _tell_skipped(counts.skipped)


def _write_idx(folder: Path, split: str, chunks: Chunks) -> int:
    """Write a split's two IDX files; gives the number of images."""
    labels = bytearray()

    def fill(file: IO[bytes]) -> None:
        file.write(_idx_header(0, 3, 32, 32))
        for some_labels, pixels in chunks:
            labels.extend(some_labels)
            file.write(pixels)
        file.seek(0)
        file.write(_idx_header(len(labels), 3, 32, 32))

    files.write_whole(folder / f"{split}-images-idx4-ubyte", fill)
    files.write_whole(folder / f"{split}-labels-idx1-ubyte", lambda file: file.write(_idx_header(len(labels)) + labels))
    return len(labels)


def _idx_header(*shape: int) -> bytes:
    return bytes([0, 0, 8, len(shape)]) + b"".join(n.to_bytes(4, "big") for n in shape)


def _from_batches(read: Callable[[str], tuple[bytes, bytes]]) -> dict[str, Chunks]:
    return {"train": map(read, TRAIN_BATCHES), "test": map(read, ("test_batch",))}


def _from_tar(path: Path, stack: contextlib.ExitStack) -> dict[str, Chunks]:
    """The batches of cifar-10-binary.tar.gz, by exact name and size; nothing is unpacked to the disk."""
    if fault := datasets.fault_of(path, CIFAR10.files[0]):
        raise DataFileError(f"{path} {fault}")
    tar = tarfile.open(path, "r:gz")  # noqa: SIM115
    stack.enter_context(tar)

    def read(name: str) -> tuple[bytes, bytes]:
        try:
            member = tar.getmember(f"cifar-10-batches-bin/{name}.bin")
            stream = tar.extractfile(member) if member.isreg() else None  # a link can lead round in a circle
        except (KeyError, tarfile.TarError) as err:
            raise DataFileError(f"{path} lacks {name}.bin ({errors.one_line(err)})") from None
        if stream is None or member.size != BATCH_IMAGES * (1 + IMAGE_BYTES):
            raise DataFileError(f"{path}: {name}.bin is no batch of {BATCH_IMAGES} images")
        return _planes(stream.read(), f"{name}.bin")

    return _from_batches(read)


def _read_binary(folder: Path, name: str) -> tuple[bytes, bytes]:
    path = folder / f"{name}.bin"
    return _planes(_read_source(path, BATCH_IMAGES * (1 + IMAGE_BYTES)), str(path))


def _read_source(path: Path, limit: int) -> bytes:
    """At most one byte more than `limit`."""
    try:
        with path.open("rb") as file:
            return file.read(limit + 1)
    except OSError as err:
        raise DataFileError(f"{path} cannot be read ({err.strerror})") from None


def _planes(records: bytes, name: str) -> tuple[bytes, bytes]:
    """Labels and images of a binary batch: a label and 3072 bytes each (https://www.cs.toronto.edu/~kriz/cifar.html)."""
    size = 1 + IMAGE_BYTES
    if len(records) != BATCH_IMAGES * size:
        raise DataFileError(f"{name} has not the {BATCH_IMAGES * size} bytes of a batch")
    images = b"".join(records[start + 1 : start + size] for start in range(0, len(records), size))
    return _checked(records[::size], name), images


def _checked(labels: bytes, name: str) -> bytes:
    if max(labels) >= len(CIFAR10_CLASSES):
        raise DataFileError(f"{name} has a label {max(labels)}, of ten classes")
    return labels


class _Anything:
    """Stands for an array, or its type, in a batch: keeps what it is made of, and runs nothing."""

    def __init__(self, *made_of: Any):
        self.made_of, self.state = made_of, ()

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _BatchUnpickler(pickle.Unpickler):
    """Knows the three names that a batch of bytes needs, and has harmless ones in their place."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in (("numpy.core.multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype")):
            raise pickle.UnpicklingError(f"asks for {module}.{name}")
        return _Anything


def _read_pickle(folder: Path, name: str) -> tuple[bytes, bytes]:
    path = folder / name
    pickled = _read_source(path, 2 * BATCH_IMAGES * IMAGE_BYTES)
    found = hashlib.md5(pickled, usedforsecurity=False).hexdigest()
    if found != PICKLE_MD5[name]:
        raise DataFileError(f"{path} has the wrong content (MD5 {found[:8]}… instead of {PICKLE_MD5[name][:8]}…)")
    try:
        batch = _BatchUnpickler(io.BytesIO(pickled), encoding="bytes").load()
        _, shape, kind, by_columns, pixels = batch[b"data"].state
        labels = bytes(batch[b"labels"])
        as_wanted = kind.made_of[0] == b"u1" and not by_columns and len(labels) == BATCH_IMAGES
        if not as_wanted or shape != (BATCH_IMAGES, IMAGE_BYTES) or len(pixels) != BATCH_IMAGES * IMAGE_BYTES:
            raise ValueError(f"an array of shape {shape}")
    except Exception as err:  # what a pickle's bytes can raise has no bounds
        raise DataFileError(f"{path} is no batch of CIFAR-10 ({errors.one_line(err)})") from None
    return _checked(labels, str(path)), pixels


def _from_listing(split: str, listing: Listing, counts: _Counts) -> Chunks:
    """The images of a class folder in its order, one at a time."""
    meter = Meter(f"cifar10 {split}", len(listing))
    most, before = write.allowed(len(listing), PackOptions()), len(counts.skipped)
    for i in range(len(listing)):
        try:
            pixels, resized = _decode_32(listing.path(i))
        except Unreadable as err:
            counts.skipped.append({"file": f"{split}/{listing.name(i)}", "why": str(err)})
            if len(counts.skipped) - before > most:
                meter.end()
                last = f"{_plain(counts.skipped[-1]['file'])} {err}"
                raise InputError(
                    f"source=: more than {most} of {len(listing)} images of {split}/ cannot be used (the last: {last}): "
                    "mend or remove them, or give another source="
                ) from None
        else:
            counts.resized += resized
            yield bytes([listing.label(i)]), pixels
        meter.show(i + 1, len(counts.skipped))
    meter.end()


def _decode_32(path: Path) -> tuple[bytes, bool]:
    """The planes of an image brought to 32 x 32 pixels, and whether that changed it. Raises packing.Unreadable."""
    from PIL import Image

    image = pillow.to_rgb(pillow.open_image(pillow.read(path)))
    resized = image.size != (32, 32)
    if resized:
        short = min(image.size)
        left, top = (image.width - short) / 2, (image.height - short) / 2
        image = image.resize((32, 32), Image.Resampling.LANCZOS, (left, top, left + short, top + short))
    return b"".join(band.tobytes() for band in image.split()), resized


# ---------------------------------------------------------------- ImageNet


def prepare_imagenet(keys: ImagenetKeys) -> None:
    """Have a packed copy of a folder of images in data_dir. Raises InputError, MachineError."""
    if not keys.data_dir:
        raise InputError("data_dir= is missing: say where the packed copy goes, data_dir=FOLDER")
    target = Path(keys.data_dir).expanduser().absolute()
    if not keys.source:
        raise InputError(
            "source= is missing: ImageNet cannot be fetched from here, its licence wants an account at image-net.org; give "
            "source=FOLDER with train/<wnid>/*.JPEG and val/<wnid>/*.JPEG (a flat val/ has to be sorted into classes first)"
        )
    source = Path(keys.source).expanduser().absolute()
    there = format.is_finished(target)
    options = PackOptions(
        keys.encoding.value, keys.size, keys.quality, keys.workers, keys.max_skipped, keys.samples_per_shard
    )
    meter = Meter("imagenet", 0)
    try:
        index = write.pack(source, target, options, _say, meter.packing)
    finally:
        meter.end()
    if there:
        _say("imagenet: already there, verified")
    for split, content in index["splits"].items():
        kinds = ", ".join(f"{count} {kind}" for kind, count in content["converted"].items())
        size = size_text(sum(shard["bytes"] for shard in content["shards"]))
        _say(f"{split}: {content['samples']} images, {size}{'; converted: ' if kinds else ''}{kinds}")
    _tell_skipped([skip for content in index["splits"].values() for skip in content["skipped"]])
    _say(f"imagenet is in {_plain(str(target))}, {len(index['classes'])} classes")
    if set(format.SPLITS) <= set(index["splits"]):  # of one alone nothing is trained
        _say(f"next: python -m recipes.imagenet data_dir={shlex.quote(str(target))}")


# ---------------------------------------------------------------- what is said


def _say(text: str) -> None:
    clear = "\r\033[K" if sys.stderr.isatty() else ""
    print(clear, end="", file=sys.stderr, flush=True)
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def _show_progress(file: DataFile, done: int) -> None:
    if sys.stderr.isatty():
        line = f"\r{file.name}  {size_text(done)} of {size_text(file.size)}  {100 * done // file.size:3d} %"
        print(line, end="", file=sys.stderr, flush=True)


def _tell_skipped(skipped: Sequence[dict[str, str]], most: int = 10) -> None:
    for skip in skipped[:most]:
        _say(f"skipped {_plain(skip['file'])}: {skip['why']}")
    if skipped:
        more = f", the first {most} named above" if len(skipped) > most else ""
        _say(f"{len(skipped)} images skipped{more}; index.json names {'all' if more else 'them'}")


def _plain(text: str) -> str:
    """In one line: names of files may be any bytes."""
    return errors.shown(text, 1000)


class Meter:
    """A progress line on a terminal; where there is none, a plain one now and then."""

    def __init__(self, name: str, total: int):
        self._name, self._total = name, total
        self._terminal = sys.stderr.isatty()
        self._start = self._last = 0.0

    def packing(self, state: Progress) -> None:
        self._total = state.total - state.kept
        self.show(state.done, state.skipped, f", {state.kept} kept" if state.kept else "")

    def show(self, done: int, skipped: int, more: str = "") -> None:
        now = time.monotonic()
        if not self._start:
            self._start, self._last = now, 0.0 if self._terminal else now
        if now - self._last < (0.2 if self._terminal else 10.0):
            return
        self._last = now
        pace = "starting"
        if done and now > self._start:
            rate = done / (now - self._start)
            pace = f"{rate:.0f} images/s, {_span((self._total - done) / rate)} left"
        line = f"{self._name}: {done} of {self._total} images, {pace}, {skipped} skipped{more}"
        print(
            f"\r\033[K{line}" if self._terminal else line,
            end="" if self._terminal else "\n",
            file=sys.stderr,
            flush=True,
        )

    def end(self) -> None:
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _span(seconds: float) -> str:
    minutes = seconds / 60
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def prepare_weights(keys: WeightsKeys) -> None:
    """Have torchvision's weights where torch looks for them. Raises InputError, MachineError.

    They are verified by the hash in their name; a file that is there already and is damaged is fetched again.
    """
    import torch

    from recipes.core.train import models

    chosen = models.find_weights(keys.arch, keys.weights)
    path = models.cached(chosen)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if models.fault_of(path):
            torch.hub.download_url_to_file(chosen.url, str(path), path.stem.rpartition("-")[2], sys.stderr.isatty())
    except (OSError, RuntimeError, http.client.HTTPException) as err:
        raise MachineError(
            f"{chosen.url} could not be fetched ({download.brief(err)}): put the file at {path} by hand"
        ) from None
    _say(f"{keys.arch}'s {chosen.name} is in {path}")
    _say(f"next: python -m recipes.imagenet arch={keys.arch} pretrained={chosen.name}")


DATASETS: dict[str, Callable[[Any], None]] = {
    "mnist": functools.partial(prepare_files, datasets.MNIST),
    "cifar10": prepare_cifar10,
    "imagenet": prepare_imagenet,
    "weights": prepare_weights,
}
KEYS: dict[str, type] = {"imagenet": ImagenetKeys, "weights": WeightsKeys}  # of the others: PrepareKeys


if __name__ == "__main__":
    sys.exit(main())
