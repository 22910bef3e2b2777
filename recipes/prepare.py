"""Fetches, verifies and unpacks or packs a dataset. Run it on a login node: compute nodes often have no internet.

    python -m recipes.prepare mnist data_dir=DIR [source=FOLDER]
    python -m recipes.prepare cifar10 data_dir=DIR [source=FOLDER]
    python -m recipes.prepare imagenet data_dir=PACKED source=FOLDER [size=256] [workers=N] …
    python -m recipes.prepare weights arch=resnet50            # for pretrained=, into $TORCH_HOME

Exit status: 0 done; 2 invalid arguments or a damaged source; 3 this machine cannot do it (offline, disk full); 130 Ctrl-C.
"""

import contextlib
import dataclasses
import hashlib
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.core import errors, files
from recipes.core.config import declare, parser
from recipes.core.config.declare import key
from recipes.core.data import cifar10, datasets, download
from recipes.core.data.datasets import DataFile, DataFileError, Dataset
from recipes.core.data.download import FetchError
from recipes.core.data.packed import format, write
from recipes.core.data.packed.format import PackOptions
from recipes.core.errors import ConfigError, InputError, MachineError

LOCK, SCRATCH = "prepare.lock", ".download"
FIX = (
    "run this where there is internet (a login node), set HTTPS_PROXY if the site has a proxy, "
    "or give another source=, such as a folder that has the files"
)
USAGE = """\
usage: python -m recipes.prepare DATASET [key=value …]

{datasets}

Run it where there is internet, usually on a login node. Packing imagenet needs its images and CPUs, but no internet.
HTTPS_PROXY, SSL_CERT_FILE and SSL_CERT_DIR are honoured.
"""


@dataclass(frozen=True)
class PrepareKeys:
    data_dir: str = key("", "folder for the data; default: $RECIPES_DATA, otherwise data/")
    source: str = key("", "folder that has the files; default: they are downloaded")

    def __post_init__(self) -> None:
        declare.check(self)


@dataclass(frozen=True)
class ImagenetKeys(PrepareKeys):
    data_dir: str = key("", "new folder for the packed copy")
    source: str = key("", "folder with train/<wnid>/*.JPEG and val/<wnid>/*.JPEG")
    size: int = key(256, "pixels of the shorter side; smaller images are not changed", low=16, high=4096)
    quality: int = key(90, "JPEG quality of resized images", low=1, high=100)
    workers: int = key(0, "number of processes; 0: one for each available CPU", low=0, high=4096)


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
        message, status = str(err), errors.EXIT_CONFIG
    except MachineError as err:
        message, status = str(err), errors.EXIT_MACHINE
    except KeyboardInterrupt:
        message, status = "interrupted; run the same command again", 130
    else:
        return 0
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
    name, *words = argv
    if name not in DATASETS:
        raise ConfigError(
            f"{errors.shown(name)}: give a dataset first, one of {', '.join(DATASETS)}{declare.nearest(name, DATASETS)}"
        )
    return name, parser.parse_keys(KEYS.get(name, PrepareKeys), words)


def prepare_mnist(keys: PrepareKeys, dataset: Dataset = datasets.MNIST) -> None:
    """Writes all files of the dataset below data_dir, unpacked and verified. Raises InputError, MachineError."""
    data_dir = datasets.folder_of(keys.data_dir).absolute()
    folder = data_dir / dataset.folders[0]
    missing = [file for file in dataset.files if not _is_valid(folder / file.name, file)]
    if missing:
        sources = [_sources(dataset, file, keys.source) for file in missing]
        with _writing(data_dir, folder, sum(file.size for file in missing)) as scratch:
            for file, candidates in zip(missing, sources, strict=True):
                content = _first_valid(file, candidates, scratch)
                files.write_bytes(folder / file.name, content)
                _say(f"{file.name}: verified, {files.size_text(file.size)}")
    _say_next(dataset, data_dir)


def _is_valid(path: Path, file: DataFile) -> bool:
    fault = datasets.fault_of(path, file)
    if fault is None:
        _say(f"{file.name}: already there, verified")
    elif os.path.lexists(path):
        _say(f"{path} {fault}: a valid copy will replace it")
    return fault is None


def _sources(dataset: Dataset, file: DataFile, source: str) -> list[str]:
    """Paths and URLs where the file may be, in the order in which to try them. Raises InputError if ``source`` lacks it."""
    if not source:
        return [f"{mirror}{file.name}.gz" for mirror in dataset.mirrors]
    if given := [str(path) for path in datasets.local_copies(source, dataset, file.name, "source")]:
        return given
    raise InputError(f"source={source!r} has no {file.name}, plain or .gz: give another source=")


def _first_valid(file: DataFile, candidates: Sequence[str], scratch: Path) -> bytes:
    """The content of ``file`` from the first candidate, a path or a URL, that has it.

    Raises InputError (all are damaged files), MachineError (no URL can be read) and OSError (the disk is full).
    """
    faults: list[str] = []
    for candidate in candidates:
        _say(f"{file.name}: from {candidate}")
        path = scratch / candidate.rpartition("/")[2] if "://" in candidate else Path(candidate)
        try:
            if "://" in candidate:
                download.fetch(candidate, path)
            content = datasets.content(path, file.size + 1)
            fault = datasets.content_fault(len(content), hashlib.sha256(content).hexdigest(), file)
            if fault is None:
                return content
        except (DataFileError, FetchError) as error:
            fault = str(error)
        faults.append(f"{candidate}: {fault}")
        _say(f"{file.name}: {fault}")
    kind = MachineError if "://" in candidates[-1] else InputError
    raise kind(f"no valid copy of {file.name} ({'; '.join(faults)}): {FIX}")


@contextlib.contextmanager
def _writing(data_dir: Path, folder: Path, need: int) -> Iterator[Path]:
    """Creates ``folder`` below ``data_dir`` and holds its lock within the ``with`` block; checks that ``need`` bytes are free.

    Removes temporary files of killed processes. Yields a new folder in ``folder``, which is removed at the end. Raises MachineError if
    another process has the lock, or if the disk cannot be written.
    """
    scratch = folder / SCRATCH
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with files.locked(folder / LOCK):
            files.remove_temporary(folder)
            shutil.rmtree(scratch, ignore_errors=True)
            files.check_free(folder, need)
            scratch.mkdir()
            try:
                yield scratch
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except OSError as err:
        raise files.disk_error(err, "data_dir", data_dir, need) from err


def _say_next(dataset: Dataset, data_dir: Path) -> None:
    _say(f"{dataset.name} is in {data_dir / dataset.folders[0]}")
    _say(f"next: python -m recipes.{dataset.recipe} data_dir={shlex.quote(str(data_dir))}")


def prepare_cifar10(keys: PrepareKeys) -> None:
    """Writes CIFAR-10 as IDX files, and index.json, into data_dir/cifar10. Raises InputError, MachineError."""
    data_dir = datasets.folder_of(keys.data_dir).absolute()
    folder = data_dir / datasets.CIFAR10.folders[0]
    if made_from := cifar10.made_from(folder):
        _say(f"cifar10: already there, verified, made from {made_from}")
    else:
        source = cifar10.local_source(keys.source, data_dir)
        need = sum(cifar10.SAMPLES.values()) * (cifar10.IMAGE_BYTES + 1)
        with _writing(data_dir, folder, 3 * need) as scratch:  # the archive, and what it contains
            (folder / "index.json").unlink(missing_ok=True)  # an unfinished conversion must not look complete
            name = str(source or cifar10.URL)
            _say(f"cifar10: from {name}")
            try:
                if source is None:
                    source = scratch / cifar10.ARCHIVE
                    download.fetch(cifar10.URL, source)
                cifar10.convert(source, folder, scratch, name)
            except FetchError as err:
                raise MachineError(f"{cifar10.URL}: {err}: {FIX}") from None
    _say_next(datasets.CIFAR10, data_dir)


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
    options = PackOptions(keys.size, keys.quality, keys.workers)
    copy = write.pack(source, target, options, _say)
    for name, split in copy.splits.items():
        size = files.size_text(sum(shard.size for shard in split.shards))
        _say(f"{name}: {split.samples} images, {size}")
        if split.skipped:
            _say(f"{name}: {split.skipped} images skipped; index.json names them")
    _say(f"imagenet is in {target}, {len(copy.classes)} classes")
    if len(copy.splits) == len(format.SPLITS):  # training needs both
        _say(f"next: python -m recipes.imagenet data_dir={shlex.quote(str(target))}")


def prepare_weights(keys: WeightsKeys) -> None:
    """Fetches torchvision's weights into torch's cache. Raises InputError, MachineError.

    The hash in the file's name verifies them. A damaged file is fetched again.
    """
    from recipes.core.train import models

    chosen = models.find_weights(keys.arch, keys.weights)
    path = models.cached(chosen)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if models.fault_of(path):
            download.fetch(chosen.url, path, path.stem.rpartition("-")[2])
    except (OSError, FetchError) as err:
        raise MachineError(f"{chosen.url} could not be fetched ({err}): copy the file to {path}") from None
    _say(f"{keys.arch}'s {chosen.name} is in {path}")
    _say(f"next: python -m recipes.imagenet arch={keys.arch} pretrained={chosen.name}")


def _say(text: str) -> None:
    print(errors.shown(text, 1000), flush=True)  # names of folders may contain any bytes


DATASETS: dict[str, Callable[[Any], None]] = {
    "mnist": prepare_mnist,
    "cifar10": prepare_cifar10,
    "imagenet": prepare_imagenet,
    "weights": prepare_weights,
}
KEYS: dict[str, type] = {"imagenet": ImagenetKeys, "weights": WeightsKeys}  # the others: PrepareKeys


if __name__ == "__main__":
    sys.exit(main())
