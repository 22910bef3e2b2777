"""Fetch, verify and unpack a dataset; run it on a login node, since compute nodes often have no internet.

    python -m recipes.prepare mnist data_dir=DIR [source=FOLDER_OR_URL]

Exit status: 0 done; 2 bad arguments or a damaged source; 3 cannot be done on this machine (offline, disk); 130 Ctrl-C.
"""

import errno
import functools
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.core import config, datafiles, rundir
from recipes.core.config import ConfigError, key
from recipes.core.datafiles import DataFile, DataFileError, Dataset, FetchError
from recipes.core.rundir import InputError, MachineError

USAGE = """\
usage: python -m recipes.prepare DATASET [data_dir=DIR] [source=FOLDER_OR_URL]

  DATASET    {datasets}
  data_dir=  where the data goes (default: $RECIPES_DATA, else data/)
  source=    a folder that has the files already, plain or .gz, or a mirror's base URL, https://…/
             (default: the public mirrors)

Run it where there is internet, usually a login node. HTTPS_PROXY, SSL_CERT_FILE and SSL_CERT_DIR are honoured.
"""


@dataclass(frozen=True)
class PrepareKeys:
    data_dir: str = key("", "where the data goes; default: $RECIPES_DATA, else data/")
    source: str = key("", "a folder that has the files already, or a mirror's base URL; default: the public mirrors")

    def __post_init__(self) -> None:
        config.check(self)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: sys.argv's); returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or {"-h", "--help", "help"} & set(arguments):
        print(USAGE.format(datasets=", ".join(DATASETS)), end="")
        return 0
    try:
        name, keys = parse(arguments)
        DATASETS[name](keys)
    except (ConfigError, InputError) as err:
        return _fail(str(err), rundir.EXIT_CONFIG)
    except MachineError as err:
        return _fail(str(err), rundir.EXIT_MACHINE)
    except KeyboardInterrupt:
        return _fail("interrupted; nothing half-written is left, the same command goes on", 130)
    return 0


def _fail(message: str, status: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return status


def parse(argv: Sequence[str]) -> tuple[str, PrepareKeys]:
    """The dataset's name and the keys. Raises ConfigError."""
    names = [word for word in argv if "=" not in word]
    if len(names) != 1:
        raise ConfigError(f"one dataset is wanted ({', '.join(DATASETS)}), got {' '.join(map(repr, names)) or 'none'}")
    if names[0] not in DATASETS:
        raise ConfigError(
            f"unknown dataset {names[0]!r}: wants one of {', '.join(DATASETS)}{config.nearest(names[0], DATASETS)}"
        )
    return names[0], config.parse_keys(PrepareKeys, [word for word in argv if "=" in word])


def prepare_files(dataset: Dataset, keys: PrepareKeys) -> None:
    """Have all of the dataset's files below data_dir, unpacked and verified. Raises InputError, MachineError."""
    data_dir = Path(keys.data_dir or datafiles.default_dir()).expanduser().absolute()
    _check_source(keys.source)
    folder = data_dir / dataset.folder
    wanted = [file for file in dataset.files if not _is_there(folder / file.name, file)]
    need = sum(file.size for file in wanted)
    try:
        datafiles.remove_stale(folder, dataset)
        if wanted:
            folder.mkdir(parents=True, exist_ok=True)
            _check_room(folder, need)
        mirrors = list(dataset.mirrors)
        for file in wanted:
            place = _fetch(file, _places(dataset, file, data_dir, keys.source, mirrors), folder, bool(keys.source))
            mirrors.sort(key=lambda mirror: not place.startswith(mirror))  # the one that worked comes first
    except OSError as err:
        raise MachineError(_disk_words(err, folder, need)) from err
    _say(f"{dataset.name} is in {folder}")
    _say(f"next: python -m recipes.{dataset.recipe} data_dir={shlex.quote(str(data_dir))}")


def _is_there(path: Path, file: DataFile) -> bool:
    fault = datafiles.fault_of(path, file)
    if fault is None:
        _say(f"{file.name}: already there, verified")
    elif os.path.lexists(path):
        _say(f"{path} {fault}: it is replaced as soon as a good copy is here")
    return fault is None


def _check_source(source: str) -> None:
    if "://" in source:
        if fault := datafiles.check_url(source):
            shown = repr(source) if "@" not in source and "?" not in source else "the URL"
            raise InputError(f"source={shown} {fault}")
    elif source and not Path(source).expanduser().is_dir():
        raise InputError(f"source={source!r} is no folder: give one that has the files, or a base URL https://…/")


def _places(dataset: Dataset, file: DataFile, data_dir: Path, source: str, mirrors: list[str]) -> list[str]:
    """Where to look for the file, in turn: URLs and paths."""
    if "://" in source:
        return [f"{source.rstrip('/')}/{file.name}.gz"]
    if source:
        paths = datafiles.local_copies(source, dataset, file)
        if not paths:
            folders = ", ".join(str(folder) for folder in datafiles.search_folders(source, dataset))
            raise InputError(f"source={source!r} has no {file.name}, plain or .gz (looked in {folders})")
        return [str(path) for path in paths]
    # A good copy that somebody has carried here saves the download; what lies at the file's own place is known as bad.
    own = data_dir / dataset.folder / file.name
    carried = [str(path) for path in datafiles.local_copies(data_dir, dataset, file) if path != own]
    return carried + [f"{mirror}{file.name}.gz" for mirror in mirrors]


def _fetch(file: DataFile, places: list[str], folder: Path, source_given: bool) -> str:
    """Install the file from the first place that has it whole, and return that place."""
    reasons = []
    all_damaged = True
    for place in places:
        try:
            _say(f"{file.name}: from {place}")
            datafiles.install(place, file, folder, functools.partial(_show_progress, file))
            _say(f"{file.name}: verified, {_megabytes(file.size)}")
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


def _check_room(folder: Path, need: int) -> None:
    usage = shutil.disk_usage(folder)
    if usage.total and usage.free < need:  # some network file systems say 0 of 0
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _disk_words(err: OSError, folder: Path, need: int) -> str:
    if err.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"data_dir: {folder} cannot be written ({err.strerror or err}): choose another data_dir="
    full = "is full" if err.errno == errno.ENOSPC else f"takes no more ({err.strerror})"
    mount = _mount_point(folder)
    free = shutil.disk_usage(folder if folder.exists() else mount).free
    return (
        f"data_dir: the disk at {mount} {full}: {_megabytes(need)} needed, {_megabytes(free)} free; "
        "make room or choose another data_dir="
    )


def _mount_point(path: Path) -> Path:
    path = path.resolve()
    while not path.is_mount():
        path = path.parent
    return path


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 100_000 else f"{size / 1e3:.1f} kB"


def _say(text: str) -> None:
    clear = "\r\033[K" if sys.stderr.isatty() else ""
    print(clear, end="", file=sys.stderr, flush=True)
    print(text, flush=True)


def _show_progress(file: DataFile, done: int) -> None:
    if sys.stderr.isatty():
        line = f"\r{file.name}  {_megabytes(done)} of {_megabytes(file.size)}  {100 * done // file.size:3d} %"
        print(line, end="", file=sys.stderr, flush=True)


DATASETS: dict[str, Callable[[PrepareKeys], None]] = {"mnist": functools.partial(prepare_files, datafiles.MNIST)}


if __name__ == "__main__":
    sys.exit(main())
