"""Fetches, verifies and unpacks or packs a dataset. Run it on a login node: compute nodes often
have no internet.

    python -m recipes.prepare mnist data_dir=DIR [source=FOLDER]
    python -m recipes.prepare cifar10 data_dir=DIR [source=FOLDER]
    python -m recipes.prepare text data_dir=DIR source=FOLDER [tokenizer=gpt2] [workers=N]
    python -m recipes.prepare dialogues data_dir=DIR source=FOLDER model=FOLDER [val=FILE] …
    python -m recipes.prepare imagenet data_dir=PACKED source=FOLDER [size=256] [workers=N] …
    # fetches the weights, and reads each image once
    python -m recipes.prepare finetune data_dir=IMAGES arch=resnet50
    # for pretrained=, into $TORCH_HOME; timm/NAME: into $HF_HOME
    python -m recipes.prepare weights arch=resnet50
    # a language model, for model= of llm; into $HF_HOME
    python -m recipes.prepare weights model=Qwen/Qwen3-0.6B

Packing imagenet needs its images and CPUs, but no internet. HTTPS_PROXY, SSL_CERT_FILE and
SSL_CERT_DIR are honoured. Exit status: 0 done; 2 invalid arguments or a damaged source; 3 this
machine cannot do it (offline, disk full); 130 Ctrl-C.
"""

import gzip
import hashlib
import http.client
import io
import shlex
import sys
import tempfile
import urllib.request
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.core import files, trust
from recipes.core.config import declare, help, parser
from recipes.core.config.declare import key
from recipes.core.data import cifar10, datasets
from recipes.core.data.packed import write
from recipes.core.data.progress import progress
from recipes.core.errors import (
    EXIT_DONE,
    EXIT_MACHINE,
    ConfigError,
    InputError,
    MachineError,
    one_line,
    shown,
)
from recipes.core.run import command_line, entry

FREE_LICENCES = ("apache-2.0", "mit")  # of timm's weights
TIMEOUT_S = 30.0  # to connect, and for each read
FIX = (
    "run this on a machine with internet, such as a login node, set HTTPS_PROXY for a proxy, "
    "or give source="
)


@dataclass(frozen=True)
class PrepareKeys:
    data_dir: str = key("", "folder for the data; default: $RECIPES_DATA, otherwise data/")
    source: str = key("", "folder that has the files; default: they are downloaded")


@dataclass(frozen=True)
class ImagenetKeys(PrepareKeys):
    data_dir: str = key("", "new folder for the packed copy")
    source: str = key("", "folder with train/<wnid>/*.JPEG and val/<wnid>/*.JPEG")
    size: int = key(
        256, "pixels of the shorter side; smaller images are not changed", low=16, high=4096
    )
    quality: int = key(90, "JPEG quality of resized images", low=1, high=100)
    workers: int = key(0, "number of threads; 0: one for each available CPU", low=0, high=4096)


@dataclass(frozen=True)
class TextKeys(PrepareKeys):
    source: str = key(
        "",
        "folder, file or pattern in quotes: .txt, .jsonl (field text) and .parquet (column text)",
    )
    tokenizer: str = key(
        "bytes", "bytes; or gpt2 or o200k_base of tiktoken", values=("bytes", "gpt2", "o200k_base")
    )
    workers: int = key(0, "number of processes; 0: one for each available CPU", low=0, high=4096)


@dataclass(frozen=True)
class DialoguesKeys(PrepareKeys):
    source: str = key(
        "",
        "folder, file or pattern in quotes: .jsonl and .parquet with messages, "
        "prompt and completion, or text",
    )

    model: str = key(
        "", "folder of a Hugging Face model, or the name of a downloaded one: for its tokenizer"
    )
    val: str = key("", "as source=, what to evaluate; default: val_fraction= of source=")
    val_fraction: float = key(0.02, "fraction of the examples to evaluate", low=0, high=1)
    seed: int = key(0, "draws the examples of val_fraction=", low=0)
    train_on: str = key(
        "completion",
        "the tokens that the loss counts: of the assistant and of completions, or all",
        values=("completion", "all"),
    )
    max_len: int = key(4096, "maximum number of tokens of an example", low=2, high=2**24)
    too_long: str = key(
        "refuse",
        "rows that are longer, or cannot be used: refuse them; drop them; cut long ones and drop "
        "the others",
        values=("refuse", "drop", "cut"),
    )
    workers: int = declare.default(TextKeys, "workers", 0)


@dataclass(frozen=True)
class WeightsKeys:
    arch: str = key("resnet50", "torchvision classifier, or timm/NAME")
    weights: str = key("true", "name of the weights, such as IMAGENET1K_V1; true: the newest")
    model: str = key("", "in place of arch=: name of a language model on the Hugging Face hub")


@dataclass(frozen=True)
class FinetuneKeys:
    data_dir: str = key(
        "", "folder of the images, as for recipes.finetune; default: $RECIPES_DATA, otherwise data/"
    )
    arch: str = key("resnet50", "torchvision classifier, or timm/NAME")
    pretrained: str = key("true", "the weights to fetch, as for recipes.finetune; false: none")
    labels: str = key("", "a CSV of files and labels, in place of class folders")
    multi_label: bool = key(False, "an image may have several labels")


def main(argv: Sequence[str]) -> int:
    """Runs a command line and returns the exit status."""
    return command_line.with_json(argv, _main)


def _main(arguments: list[str], told: dict[str, Any]) -> int:
    """Runs a command line without ``--json``. told: gets the dataset and its keys."""
    if not arguments or {"-h", "--help", "help"} & set(arguments):
        lines = [(__doc__ or "").rstrip()]
        for name, (keys, _) in DATASETS.items():
            lines += help.keys_of(f"keys of {name}", keys)
        print("\n".join(lines))
        return EXIT_DONE
    try:
        name, *words = arguments
        if name not in DATASETS:
            known = f"one of {', '.join(DATASETS)}{declare.nearest(name, DATASETS)}"
            raise ConfigError(f"{shown(name)}: give a dataset first, {known}")
        keys, work = DATASETS[name]
        chosen = parser.parse_keys(keys, words)
        told |= {"dataset": name, **vars(chosen)}
        data_dir = Path("FOLDER")  # in the line below, after weights, which have no folder
        if name != "weights":
            data_dir = datasets.folder_of(chosen.data_dir).absolute()
        entry.set_compile_cache()  # libraries of models read it when they are imported
        recipe = work(chosen, data_dir)
        _say(f"next: python launch.py recipe={recipe} data_dir={shlex.quote(str(data_dir))}")
        return EXIT_DONE
    except (ConfigError, InputError, MachineError) as error:
        message = str(error)
        status = error.exit_status
    except OSError as error:
        message = f"{error.filename or 'data_dir'}: {error.strerror or error}"
        status = EXIT_MACHINE
    except KeyboardInterrupt:
        message = "interrupted; run the same command again"
        status = 130
    told["error"] = message
    print(f"error: {shown(message, 1000)}", file=sys.stderr)
    return status


# Each function for a dataset returns the recipe to give launch.py next, with its keys.


def prepare_mnist(keys: PrepareKeys, data_dir: Path) -> str:
    """Writes all files of MNIST below data_dir, unpacked and verified. Raises InputError,
    MachineError, OSError.
    """
    folder = data_dir / datasets.MNIST.folder
    trust.own_folder(folder.parent, "data_dir")  # in a copy of a data folder, it may be a link
    with trust.data_folder(folder) as place:
        for file in datasets.MNIST_FILES:
            if datasets.fault_of(place / file.name, file) is None:
                _say(f"{file.name}: already there, verified")
            else:
                files.write_bytes(place / file.name, _fetched(file, keys.source))
                _say(f"{file.name}: verified, {files.size_text(file.size)}")
    _say(f"mnist is in {folder}")
    return "mnist"


def _fetched(file: datasets.DataFile, source: str) -> bytes:
    """The content of a file of MNIST, unpacked, from the folder ``source`` or the internet. Raises
    InputError if it is another content.
    """
    if source:
        path = datasets.find_file(Path(source).expanduser(), datasets.MNIST, file.name, "source")
        if not path:
            lacking = f"has no {file.name}, plain or .gz"
            raise InputError(f"source={source!r} {lacking}: give another source=")
        where = str(path)
        with open(path, "rb", opener=files.without_waiting) as opened:
            content = opened.read(file.size + (1 << 20))  # the largest .gz is hardly larger
    else:
        where = f"{datasets.MNIST_URL}{file.name}.gz"
        content = download(where)
    try:
        # not by the name: browsers and some proxies unpack a .gz and keep its name
        if content.startswith(b"\x1f\x8b"):
            content = gzip.GzipFile(fileobj=io.BytesIO(content)).read(file.size + 1)
        fault = datasets.content_fault(content, file)
    except (EOFError, OSError, zlib.error) as error:
        fault = f"is damaged ({error})"
    if fault:
        raise InputError(f"{where} {fault}: give another source=")
    return content


def download(url: str, fix: str = FIX) -> bytes:
    """The content of ``url``. TLS is verified; proxies and SSL_CERT_FILE are honoured. Raises
    MachineError, with ``fix``.
    """
    _say(f"downloading {url}")
    try:
        request = urllib.request.Request(url, headers={"User-Agent": "slurm-torch-recipes"})
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            content = bytearray()
            size = int(answer.headers.get("Content-Length") or 0)
            report = progress(url, size >> 20, "MiB", _say)
            while block := answer.read(1 << 20):
                content += block
                report(len(content) >> 20)
            if len(content) < size:
                raise http.client.IncompleteRead(b"", size - len(content))
            return bytes(content)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise MachineError(f"{url}: {one_line(error)}: {fix}") from None


def prepare_cifar10(keys: PrepareKeys, data_dir: Path) -> str:
    """Writes CIFAR-10 as IDX files, and index.json, into data_dir/cifar10. Raises InputError,
    MachineError, OSError.
    """
    folder = data_dir / datasets.CIFAR10.folder
    made_from = cifar10.made_from(folder)
    if made_from:
        _say(f"cifar10: already there, verified, made from {made_from}")
    else:
        source = cifar10.local_source(keys.source) if keys.source else None
        # nobody can exchange the files in scratch before they are unpickled
        with trust.data_folder(folder) as place, tempfile.TemporaryDirectory() as scratch:
            # an unfinished conversion must not look complete
            (place / "index.json").unlink(missing_ok=True)
            trust.private_temporary(Path(scratch))
            name = str(source or cifar10.URL)
            if source is None:
                source = Path(scratch, cifar10.ARCHIVE)
                source.write_bytes(download(cifar10.URL))
            cifar10.convert(source, place, Path(scratch), name)
    _say(f"cifar10 is in {folder}")
    return "cifar"


def prepare_imagenet(keys: ImagenetKeys, data_dir: Path) -> str:
    """Writes a packed copy of a folder of images into data_dir. Raises InputError, MachineError."""
    if not keys.data_dir:
        fix = "give the folder for the packed copy, data_dir=FOLDER"
        raise InputError(f"data_dir= is missing: {fix}")
    if not keys.source:
        raise InputError(
            "source= is missing: ImageNet's licence requires an account at image-net.org: "
            "give source=FOLDER with train/<wnid>/*.JPEG and val/<wnid>/*.JPEG "
            "(sort a flat val/ into class folders first)"
        )
    source = Path(keys.source).expanduser().absolute()
    warnings.simplefilter("ignore")  # Pillow's, of damaged metadata
    copy = write.pack(source, data_dir, keys.size, keys.quality, keys.workers, _say)
    for name, split in copy.splits.items():
        size = files.size_text(sum(shard.size for shard in split.shards))
        _say(f"{name}: {split.samples} images, {size}")
        if split.skipped:
            _say(f"{name}: {split.skipped} images skipped; index.json names them")
    _say(f"imagenet is in {data_dir}, {len(copy.classes)} classes")
    return "imagenet"


def prepare_text(keys: TextKeys, data_dir: Path) -> str:
    """Writes text as token ids into data_dir/text. Raises InputError, MachineError."""
    from recipes.core.data import text

    if not keys.source:
        raise InputError("source= is missing: give the folder of your text, source=FOLDER")
    folder = data_dir / datasets.TEXT.folder
    text.write(keys.source, folder, keys.tokenizer, keys.workers, _say)
    _say(f"text is in {folder}")
    return "gpt"


def prepare_dialogues(keys: DialoguesKeys, data_dir: Path) -> str:
    """Writes dialogues as tokens into data_dir/dialogues. Raises InputError, MachineError."""
    from recipes.core.data import dialogues

    if not keys.source:
        raise InputError("source= is missing: give the folder of your dialogues, source=FOLDER")
    dialogues.write(keys, data_dir / datasets.DIALOGUES.folder, _say)
    parts = dialogues.open_dialogues(str(data_dir))
    for name, examples in zip(("training", "validation"), parts, strict=True):
        tokens = f"{examples.lengths.sum():,} tokens; the loss counts {examples.counted.sum():,}"
        _say(f"{name}: {len(examples):,} examples, {tokens}")
    model = Path(keys.model).expanduser()
    name = str(model.absolute()) if model.is_dir() else keys.model  # a job starts elsewhere
    max_len = "" if keys.max_len == DialoguesKeys.max_len else f" max_len={keys.max_len}"
    return f"llm model={shlex.quote(name)}{max_len}"


def prepare_weights(keys: WeightsKeys, data_dir: Path) -> str:
    """Fetches torchvision's weights into torch's cache. The hash in the file's name verifies them.
    Or fetches a language model. Raises InputError, MachineError.
    """
    if keys.model:
        from recipes.core.data import hub

        _say(f"{keys.model} is in {hub.fetch(keys.model)}")
        return f"llm model={keys.model}"
    from recipes.core.train import models

    if keys.arch.startswith(models.TIMM):
        name = keys.arch.removeprefix(models.TIMM)
        _fetch_from_hub(keys.arch, name, models.require_timm(name, offline=False))
        return f"finetune arch={keys.arch} pretrained=true"
    chosen = models.find_weights(keys.arch, keys.weights)
    path = models.cached(chosen)
    if models.fault_of(path):
        fix = f"download the file on another machine, and copy it to {path}"
        content = download(chosen.url, fix)
        if not hashlib.sha256(content).hexdigest().startswith(path.stem.rpartition("-")[2]):
            raise MachineError(f"{chosen.url}: its SHA-256 differs from the one in its name: {fix}")
        with files.writing_to(path.parent, "TORCH_HOME"):
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write_bytes(path, content)
    _say(f"{keys.arch}'s {chosen.name} is in {path}")
    return f"finetune arch={keys.arch} pretrained={chosen.name}"


def _fetch_from_hub(arch: str, name: str, timm: Any) -> None:
    """Fetches the weights of a model of timm into the cache of the Hugging Face hub, which verifies
    them. Raises MachineError.
    """
    try:
        timm.create_model(name, pretrained=True)
    except Exception as error:  # no internet, a full disk
        fix = "run this command on a machine with internet, and copy its folder $HF_HOME here"
        raise MachineError(f"arch={arch}: {one_line(error, 120)}: {fix}") from None
    licence = timm.get_pretrained_cfg(name).license or "unknown"
    if licence not in FREE_LICENCES:
        _say(f"{arch}: the licence of these weights is {licence}: read it before you use them")
    _say(f"{arch}'s weights are in the cache of the Hugging Face hub ($HF_HOME)")


def prepare_finetune(keys: FinetuneKeys, data_dir: Path) -> str:
    """Decodes every image of data_dir once, and fetches the weights. Raises InputError, which names
    images that cannot be read.
    """
    from recipes.core.data import labelled

    parts = labelled.open_parts(
        "images", keys.data_dir, keys.labels, keys.multi_label, 0.2, 0, _say
    )
    faults = 0
    count = 0
    for source, positions in parts:
        pictures = labelled.Pictures(source, positions, lambda image: None)
        report = progress("decoded", len(pictures), "images", _say)
        count += len(pictures)
        for i in range(len(pictures)):
            report(i)
            try:
                pictures[i]
            except InputError as error:
                faults += 1
                _say(str(error))
    if faults:
        raise InputError(f"{faults} of {count} images cannot be read: remove or replace them")
    _say(f"{count} images in {len(parts[0][0].classes)} classes can be read")
    recipe = f"finetune arch={keys.arch} pretrained=false"
    if keys.pretrained != "false":
        recipe = prepare_weights(WeightsKeys(keys.arch, keys.pretrained), data_dir)
    if keys.labels:
        recipe += f" labels={shlex.quote(str(Path(keys.labels).expanduser().absolute()))}"
    if keys.multi_label:
        recipe += " multi_label=true"
    return recipe


def _say(text: str) -> None:
    print(shown(text, 1000), flush=True)  # names of folders may contain any bytes


DATASETS: dict[str, tuple[type, Callable[[Any, Path], str]]] = {
    "mnist": (PrepareKeys, prepare_mnist),
    "cifar10": (PrepareKeys, prepare_cifar10),
    "text": (TextKeys, prepare_text),
    "dialogues": (DialoguesKeys, prepare_dialogues),
    "imagenet": (ImagenetKeys, prepare_imagenet),
    "weights": (WeightsKeys, prepare_weights),
    "finetune": (FinetuneKeys, prepare_finetune),
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
