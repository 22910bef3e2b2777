"""Fetches, verifies and unpacks or packs a dataset. Run it on a login node: compute nodes often have no internet.

    python -m recipes.prepare mnist data_dir=DIR [source=FOLDER_OR_URL]
    python -m recipes.prepare cifar10 data_dir=DIR [source=FOLDER_OR_URL]
    python -m recipes.prepare imagenet data_dir=PACKED source=FOLDER [size=256] [workers=N] …
    python -m recipes.prepare weights arch=resnet50            # for pretrained=, into $TORCH_HOME

Exit status: 0 done; 2 invalid arguments or a damaged source; 3 this machine cannot do it (offline, disk full); 130 Ctrl-C.
"""

import contextlib
import dataclasses
import http.client
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.core import errors, files
from recipes.core.config import declare, parser
from recipes.core.config.declare import key
from recipes.core.data import cifar10, datasets, download
from recipes.core.data.datasets import DataFile, DataFileError, Dataset
from recipes.core.data.packed import format, write
from recipes.core.data.packed.format import PackOptions
from recipes.core.data.progress import Meter
from recipes.core.errors import ConfigError, InputError, MachineError

LOCK = "prepare.lock"
WAIT_S = 0.5  # between two attempts to take a lock
MAX_NAMED = 10  # skipped images that are named
USAGE = """\
usage: python -m recipes.prepare DATASET [key=value …]

{datasets}

Run it where there is internet, usually on a login node. Packing imagenet needs its images and CPUs, but no internet.
HTTPS_PROXY, SSL_CERT_FILE and SSL_CERT_DIR are honoured.
"""


@dataclass(frozen=True)
class PrepareKeys:
    data_dir: str = key("", "folder for the data; default: $RECIPES_DATA, otherwise data/")
    source: str = key("", "folder that has the files, or a mirror's base URL; default: the public mirrors")

    def __post_init__(self) -> None:
        declare.check(self)


@dataclass(frozen=True)
class ImagenetKeys:
    data_dir: str = key("", "new folder for the packed copy")
    source: str = key("", "folder with train/<wnid>/*.JPEG and val/<wnid>/*.JPEG")
    size: int = key(256, "pixels of the shorter side; smaller images are not changed", low=16, high=4096)
    quality: int = key(90, "JPEG quality of resized images", low=1, high=100)
    workers: int = key(0, "number of processes; 0: one for each available CPU", low=0, high=4096)
    max_skipped: int | None = key(None, "unreadable images allowed in each split; default: 1 %, at least 10", low=0)
    samples_per_shard: int = key(2048, "images in one file", low=1, high=1_000_000)

    def __post_init__(self) -> None:
        declare.check(self)


@dataclass(frozen=True)
class WeightsKeys:
    arch: str = key("resnet50", "torchvision classifier", pattern=r"[a-z][a-z0-9_]{0,63}", form="a model's name")
    weights: str = key(
        "true",
        "name of the weights, such as IMAGENET1K_V1; true: the newest",
        pattern=declare.NAME,
        form=declare.NAME_FORM,
    )

    def __post_init__(self) -> None:
        declare.check(self)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line ``argv`` (default: that of sys.argv) and returns the exit status."""
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
        return _fail("interrupted; no partial files are left, the same command continues", 130)
    return 0


def _fail(message: str, status: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return status


def _help(dataset: str) -> str:
    fields = dataclasses.fields(KEYS.get(dataset, PrepareKeys))
    lines = []
    for field in fields:
        shown = "" if field.default in ("", None) else f" (default {field.default})"
        lines.append(f"    {field.name + '=':<19}{field.metadata['help']}{shown}")
    return "\n".join([f"  {dataset}", *lines])


def parse(argv: Sequence[str]) -> tuple[str, Any]:
    """The dataset's name and its keys. Raises ConfigError."""
    names = [word for word in argv if "=" not in word]
    if len(names) != 1:
        got = " ".join(repr(name[: errors.MAX_SHOWN]) for name in names[:4]) or "none"
        raise ConfigError(f"give one dataset of {', '.join(DATASETS)}, got {got}")
    if names[0] not in DATASETS:
        raise ConfigError(
            f"unknown dataset {names[0][: errors.MAX_SHOWN]!r}: give one of {', '.join(DATASETS)}{declare.nearest(names[0], DATASETS)}"
        )
    return names[0], parser.parse_keys(KEYS.get(names[0], PrepareKeys), [word for word in argv if "=" in word])


def prepare_mnist(keys: PrepareKeys, dataset: Dataset = datasets.MNIST) -> None:
    """Writes all files of the dataset below data_dir, unpacked and verified. Raises InputError, MachineError."""
    data_dir = datasets.folder_of(keys.data_dir).absolute()
    _check_source(keys.source)
    folder = data_dir / dataset.folder
    missing = [file for file in dataset.files if not _is_valid(folder / file.name, file)]
    need = sum(file.size for file in missing)
    if missing:
        with _writing(data_dir, folder, need, wait=True):
            mirrors = list(dataset.mirrors)
            for file in missing:
                if datasets.fault_of(folder / file.name, file):  # otherwise another process has just fetched it
                    sources = _sources(dataset, file, data_dir, keys.source, mirrors)
                    used = _fetch(dataset, file, sources, folder, keys)
                    mirrors.sort(key=lambda mirror: not used.startswith(mirror))
    _say_next(dataset, data_dir)


@contextlib.contextmanager
def _writing(data_dir: Path, folder: Path, need: int, wait: bool = False) -> Iterator[None]:
    """Creates ``folder`` below ``data_dir`` and holds its lock within the ``with`` block; checks that ``need`` bytes are free.

    Removes temporary files of killed processes. wait: wait for another process that has the lock; otherwise MachineError is raised.
    Raises MachineError if the disk cannot be written.
    """
    is_first_call = True

    def waiting() -> None:
        nonlocal is_first_call
        if is_first_call:
            _say(f"{folder / LOCK}: waiting for another process")
        is_first_call = False
        time.sleep(WAIT_S)

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with files.locked(folder / LOCK, waiting if wait else None) as held:
            if held:
                files.remove_temporary(folder)
            else:
                _say(f"{folder / LOCK}: this file system has no locks: start no second process for this folder")
            files.check_free(folder, need)
            yield
    except OSError as err:
        raise files.disk_error(err, "data_dir", data_dir, need) from err


def _say_next(dataset: Dataset, data_dir: Path) -> None:
    _say(f"{dataset.name} is in {data_dir / dataset.folder}")
    _say(f"next: python -m recipes.{dataset.recipe} data_dir={shlex.quote(str(data_dir))}")


def _is_valid(path: Path, file: DataFile) -> bool:
    fault = datasets.fault_of(path, file)
    if fault is None:
        _say(f"{file.name}: already there, verified")
    elif os.path.lexists(path):
        _say(f"{path} {fault}: a valid copy will replace it")
    return fault is None


def _check_source(source: str) -> None:
    if "://" in source:
        download.check_url(source)
    elif source and datasets.kind(Path(source).expanduser(), "source") != "folder":
        raise InputError(f"source={source!r} is not a folder: give one that has the files, or a base URL https://…/")


def _sources(dataset: Dataset, file: DataFile, data_dir: Path, source: str, mirrors: list[str]) -> list[str]:
    """URLs and paths where the file may be, in the order in which to try them."""
    if "://" in source:
        return [f"{source.rstrip('/')}/{file.name}{dataset.ending}"]
    if source:
        paths = datasets.local_copies(source, dataset, file, "source")
        if not paths:
            folders = ", ".join(str(folder) for folder in datasets.search_folders(source, dataset))
            raise InputError(f"source={source!r} has no {file.name}, plain or .gz (looked in {folders})")
        return [str(path) for path in paths]
    # A copy elsewhere below data_dir saves the download; the one in the file's own place is known to be invalid.
    own = data_dir / dataset.folder / file.name
    local = [str(path) for path in datasets.local_copies(data_dir, dataset, file) if path != own]
    return local + [f"{mirror}{file.name}{dataset.ending}" for mirror in mirrors]


def _fetch(dataset: Dataset, file: DataFile, sources: list[str], folder: Path, keys: PrepareKeys) -> str:
    unpack, given = bool(dataset.ending), bool(keys.source)
    return download.fetch(file, sources, folder, unpack=unpack, say=_say, progress=_show_bytes, given=given)


def prepare_cifar10(keys: PrepareKeys) -> None:
    """Writes CIFAR-10 as IDX files, and index.json, into data_dir/cifar10. Raises InputError, MachineError."""
    data_dir = datasets.folder_of(keys.data_dir).absolute()
    dataset = datasets.CIFAR10
    folder, archive = data_dir / dataset.folder, dataset.files[0]
    need = 6 * cifar10.BATCH_IMAGES * (cifar10.IMAGE_BYTES + 1)
    if not cifar10.is_converted(folder, keys.source, _say):
        if "://" in keys.source:
            download.check_url(keys.source)
            local, urls = [], [f"{keys.source.rstrip('/')}/{archive.name}"]
        else:
            local = cifar10.local_sources(keys.source, data_dir)
            urls = [] if keys.source else [f"{mirror}{archive.name}" for mirror in dataset.mirrors]
        need += archive.size if urls else 0
        with _writing(data_dir, folder, need):
            (folder / "index.json").unlink(missing_ok=True)  # an unfinished conversion must not look complete
            if not _convert_local(local, folder, last=not urls):
                _fetch_and_convert(archive, urls, folder, keys)
    _say_next(dataset, data_dir)


def _convert_local(sources: Sequence[Path], folder: Path, last: bool) -> bool:
    """Converts the first undamaged copy. Returns False if there is none, or raises InputError if ``last``.

    last: there is nothing to try after these sources.
    """
    for source in sources:
        _say(f"cifar10: from {_one_line(str(source))}")
        try:
            _convert_cifar10(source, folder)
            return True
        except DataFileError as err:
            if last and source == sources[-1]:
                raise InputError(f"source={str(source)!r}: {err}; give another source=") from None
            _say(f"cifar10: {_one_line(str(err))}; trying the next source")
    return False


def _fetch_and_convert(archive: DataFile, urls: list[str], folder: Path, keys: PrepareKeys) -> None:
    """Fetches the archive from the first URL that has it, converts it, and removes it unless it existed before."""
    path = folder / archive.name
    was_there = os.path.lexists(path)
    try:
        used = _fetch(datasets.CIFAR10, archive, urls, folder, keys)
        _convert_cifar10(path, folder, used)
    finally:
        if not was_there:
            path.unlink(missing_ok=True)


def _convert_cifar10(source: Path, folder: Path, name: str = "") -> None:
    meters = {split: Meter(f"cifar10 {split}") for split in ("train", "test")}
    try:
        skipped = cifar10.convert(source, folder, _say, lambda split, state: meters[split].show(state), name)
    finally:
        meters["test"].end()
    _say_skipped(skipped)


def prepare_imagenet(keys: ImagenetKeys) -> None:
    """Writes a packed copy of a folder of images into data_dir. Raises InputError, MachineError."""
    if not keys.data_dir:
        raise InputError("data_dir= is missing: give the folder for the packed copy, data_dir=FOLDER")
    target = Path(keys.data_dir).expanduser().absolute()
    if not keys.source:
        raise InputError(
            "source= is missing: ImageNet cannot be downloaded here, its licence requires an account at image-net.org; give "
            "source=FOLDER with train/<wnid>/*.JPEG and val/<wnid>/*.JPEG (sort a flat val/ into class folders first)"
        )
    source = Path(keys.source).expanduser().absolute()
    was_finished = format.is_finished(target)
    options = PackOptions(keys.size, keys.quality, keys.workers, keys.max_skipped, keys.samples_per_shard)
    meter = Meter("imagenet")
    try:
        copy = write.pack(source, target, options, _say, meter.show)
    finally:
        meter.end()
    if was_finished:
        _say("imagenet: already there, verified")
    for name, split in copy.splits.items():
        kinds = ", ".join(f"{count} {kind}" for kind, count in split.converted.items())
        size = files.size_text(sum(shard.size for shard in split.shards))
        _say(f"{name}: {split.samples} images, {size}{'; converted: ' if kinds else ''}{kinds}")
    _say_skipped([skip for split in copy.splits.values() for skip in split.skipped])
    _say(f"imagenet is in {_one_line(str(target))}, {len(copy.classes)} classes")
    if set(format.SPLITS) <= set(copy.splits):  # training needs both
        _say(f"next: python -m recipes.imagenet data_dir={shlex.quote(str(target))}")


def prepare_weights(keys: WeightsKeys) -> None:
    """Fetches torchvision's weights into torch's cache. Raises InputError, MachineError.

    The hash in the file's name verifies them. A damaged file is fetched again.
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
            f"{chosen.url} could not be fetched ({download.describe(err)}): copy the file to {path}"
        ) from None
    _say(f"{keys.arch}'s {chosen.name} is in {path}")
    _say(f"next: python -m recipes.imagenet arch={keys.arch} pretrained={chosen.name}")


def _say(text: str) -> None:
    clear = "\r\033[K" if sys.stderr.isatty() else ""
    print(clear, end="", file=sys.stderr, flush=True)
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def _show_bytes(file: DataFile, done: int) -> None:
    if sys.stderr.isatty():
        line = f"\r{file.name}  {files.size_text(done)} of {files.size_text(file.size)}  {100 * done // file.size:3d} %"
        print(line, end="", file=sys.stderr, flush=True)


def _say_skipped(skipped: Sequence[Mapping[str, str]]) -> None:
    for skip in skipped[:MAX_NAMED]:
        _say(f"skipped {_one_line(skip['file'])}: {skip['why']}")
    if skipped:
        named = f"; the first {MAX_NAMED} are named above" if len(skipped) > MAX_NAMED else ""
        _say(f"{len(skipped)} images skipped{named}; index.json names all")


def _one_line(text: str) -> str:
    """``text`` in one line. File names may contain any bytes."""
    return errors.shown(text, 1000)


DATASETS: dict[str, Callable[[Any], None]] = {
    "mnist": prepare_mnist,
    "cifar10": prepare_cifar10,
    "imagenet": prepare_imagenet,
    "weights": prepare_weights,
}
KEYS: dict[str, type] = {"imagenet": ImagenetKeys, "weights": WeightsKeys}  # the others: PrepareKeys


if __name__ == "__main__":
    sys.exit(main())
