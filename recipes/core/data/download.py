"""Data files: which ones a dataset has, reading them, fetching them whole and verified. Standard library only.

What may not happen: a half-written file under its final name, a body read without bound, a byte trusted unverified.
"""

import contextlib
import errno
import fcntl
import gzip
import hashlib
import http.client
import io
import ipaddress
import math
import mmap
import os
import re
import secrets
import shlex
import shutil
import socket
import ssl
import stat
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from recipes.core.errors import InputError

CHUNK_BYTES = 1 << 20
TIMEOUT_S = 30.0  # to connect, and for each read
TOTAL_S = 1800.0  # for one file from one mirror, so that a mirror that drips cannot hold us for ever
RETRIES = 3
RETRY_WAIT_S = 1.0
STALE_S = 86400.0  # another host's temporary file is left alone for so long: its locks may not be seen from here


class DataFileError(InputError):
    """A data file is missing or has the wrong content. One line: the file, what is wrong, the mend."""


class FetchError(Exception):
    """A source could not be read: network, TLS, timeout, or an unreadable local file. One line, in brief."""


@dataclass(frozen=True)
class DataFile:
    """A file as it lies in its folder: name, size in bytes, SHA-256 in hexadecimal.

    keep_packed: it is served, kept and hashed as it is; else it is served as NAME.gz and lies unpacked.
    """

    name: str
    size: int
    sha256: str
    keep_packed: bool = False

    @property
    def served_name(self) -> str:
        return self.name if self.keep_packed else f"{self.name}.gz"


@dataclass(frozen=True)
class Dataset:
    """A dataset of a few files: where below data_dir they belong, and base URLs that serve them."""

    name: str
    recipe: str
    folder: str
    files: tuple[DataFile, ...]
    mirrors: tuple[str, ...]


# The names, and the first mirror, are torchvision 0.30's (datasets/mnist.py); the second is the one that TensorFlow's
# examples use. Both serve the same bytes. yann.lecun.com is left out: it has no working https copy any more.
# Hashes are of the unpacked files, since a .gz packed again has other bytes and the same content.
MNIST = Dataset(
    name="mnist",
    recipe="mnist",
    folder="MNIST/raw",
    files=(
        DataFile(
            "train-images-idx3-ubyte", 47040016, "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"
        ),
        DataFile("train-labels-idx1-ubyte", 60008, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
        DataFile("t10k-images-idx3-ubyte", 7840016, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
        DataFile("t10k-labels-idx1-ubyte", 10008, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
    ),
    mirrors=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
)
IDX_KEYS = ("train_images", "train_labels", "test_images", "test_labels")

# Size and SHA-256 are those of the one file that https://www.cs.toronto.edu/~kriz/cifar.html serves.
CIFAR10 = Dataset(
    name="cifar10",
    recipe="cifar",
    folder="cifar10",
    files=(
        DataFile(
            "cifar-10-binary.tar.gz",
            170052171,
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            keep_packed=True,
        ),
    ),
    mirrors=("https://www.cs.toronto.edu/~kriz/",),
)
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
# What prepare makes of it, by the keys of IDX_KEYS: images of shape (N, 3, 32, 32).
CIFAR10_IDX = (
    "train-images-idx4-ubyte",
    "train-labels-idx1-ubyte",
    "test-images-idx4-ubyte",
    "test-labels-idx1-ubyte",
)


# ---------------------------------------------------------------- finding and reading


def default_dir() -> str:
    """Where data is kept where nothing else says: ``$RECIPES_DATA``, else ``data`` in the working folder."""
    return os.environ.get("RECIPES_DATA") or "data"


def search_folders(root: str | Path, dataset: Dataset) -> list[Path]:
    """The folders that may hold the dataset's files, in the order of search: torchvision's layout, by name, root."""
    base = Path(root).expanduser()
    return [base / dataset.folder, base / dataset.name, base]


def kind(path: Path, key: str = "data_dir") -> str:
    """``file`` or ``folder``, what links lead to; "" for neither. Raises DataFileError, naming ``key``, where one may not look."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as err:  # Path.is_file and its like raise it as it is, or from Python 3.14 on say no
        raise DataFileError(
            f"{key}: {str(path)!r} cannot be read ({_strerror(err)}): make it readable, or give another {key}="
        ) from None
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else ""


def local_copies(root: str | Path, dataset: Dataset, file: DataFile, key: str = "data_dir") -> list[Path]:
    """The copies of `file` that lie below `root`, unverified, in the order of preference: plain before .gz.

    key: whose value `root` is. Raises DataFileError as `kind` does.
    """
    ends = ("",) if file.keep_packed else ("", ".gz")
    candidates = [folder / (file.name + end) for folder in search_folders(root, dataset) for end in ends]
    return [path for path in candidates if kind(path, key) == "file"]


def prepare_command(dataset_name: str, data_dir: str | Path) -> str:
    """The command that mends missing or damaged data, ready to be pasted into a shell."""
    return f"python -m recipes.prepare {dataset_name} data_dir={shlex.quote(str(data_dir))}"


def find_mnist(data_dir: str | Path) -> dict[str, Path]:
    """MNIST's files below `data_dir`: train_images, train_labels, test_images, test_labels; their content unverified.

    Raises DataFileError, which names what was looked for and where, if one is missing.
    """
    found = {key: local_copies(data_dir, MNIST, file) for key, file in zip(IDX_KEYS, MNIST.files, strict=True)}
    missing = [file.name for file, paths in zip(MNIST.files, found.values(), strict=True) if not paths]
    if missing:
        folders = ", ".join(str(folder) for folder in search_folders(data_dir, MNIST))
        raise DataFileError(
            f"data_dir={str(data_dir)!r} lacks {', '.join(missing)} (plain or .gz; looked in {folders}): "
            f"on a machine with internet, run {prepare_command('mnist', data_dir)}"
        )
    return {key: paths[0] for key, paths in found.items()}


def find_cifar10(data_dir: str | Path) -> dict[str, Path]:
    """CIFAR-10's files as prepare leaves them below `data_dir`: train_images, train_labels, test_images, test_labels.

    Beside them lies index.json, written last: classes, source, samples, sha256. The files' content is unverified.
    Raises DataFileError, which names what was looked for and where, if one is missing.
    """
    folder = Path(data_dir).expanduser() / CIFAR10.folder
    missing = [name for name in (*CIFAR10_IDX, "index.json") if kind(folder / name) != "file"]
    if missing:
        raise DataFileError(
            f"data_dir={str(data_dir)!r} lacks {', '.join(missing)} (looked in {folder}): on a machine with internet, "
            f"or with source=FOLDER of a copy, run {prepare_command('cifar10', data_dir)}"
        )
    return {key: folder / name for key, name in zip(IDX_KEYS, CIFAR10_IDX, strict=True)}


def find_imagenet(data_dir: str | Path) -> Path:
    """The folder of class folders, train and val, or of a packed copy: `data_dir`, or imagenet in it. Their content is not checked.

    Raises DataFileError where there is none.
    """
    for folder in (Path(data_dir).expanduser(), Path(data_dir).expanduser() / "imagenet"):
        if kind(folder / "index.json") or all(kind(folder / split) == "folder" for split in ("train", "val")):
            return folder
    raise DataFileError(
        f"data_dir={str(data_dir)!r} has neither train/<class>/*.JPEG and val/<class>/*.JPEG nor a packed copy's index.json: give"
        f" the folder that holds them, or pack a copy: {prepare_command('imagenet', '…')} source=FOLDER"
    )


def read_idx(path: str | Path) -> tuple[tuple[int, ...], bytes | memoryview]:
    """Shape and payload (row-major uint8, as many bytes as the shape's product) of an IDX file, plain or gzip.

    A plain file is mapped, so that the ranks of a node share its pages; the mapping is private: writing to the view
    changes neither the file nor another process's view, and costs memory. A gzip file is unpacked into bytes.
    Raises DataFileError (one line: file, fault, mend). Format: http://yann.lecun.com/exdb/mnist/, "THE IDX FILE
    FORMAT": two zero bytes, type, number of dimensions, the dimensions as big-endian uint32, the data.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            packed = file.read(1) == b"\x1f"
            file.seek(0)
            return _read_packed_idx(file) if packed else _map_idx(file)
    except DataFileError as err:
        fault = str(err)
    except (EOFError, OSError, zlib.error) as err:
        fault = _content_fault(err) or f"cannot be read ({_strerror(err)})"
    raise DataFileError(f"{path}: {fault}; to mend it: {_mend(path)}")


def _read_packed_idx(file: IO[bytes]) -> tuple[tuple[int, ...], bytes]:
    packed_size = os.fstat(file.fileno()).st_size
    with gzip.GzipFile(fileobj=file) as plain:
        shape = _idx_shape(plain)
        size = math.prod(shape)
        # Deflate packs at most 1032 to 1 (zlib's technical notes): a header that claims more asks for memory in vain.
        if size > 1032 * packed_size:
            raise DataFileError(f"its header says {size} bytes, which {packed_size} packed ones cannot hold")
        payload = plain.read(size + 1)
    if len(payload) != size:
        more = "more" if len(payload) > size else f"only {len(payload)}"
        raise DataFileError(f"its header says {size} bytes of data, it has {more}")
    return shape, payload


def _map_idx(file: IO[bytes]) -> tuple[tuple[int, ...], memoryview]:
    shape = _idx_shape(file)
    size, offset = math.prod(shape), file.tell()
    there = os.fstat(file.fileno()).st_size - offset
    if there != size:
        raise DataFileError(f"its header says {size} bytes of data, it has {there}")
    # ACCESS_COPY, not ACCESS_READ: torch.frombuffer warns of a read-only buffer.
    return shape, memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))[offset:]


def _idx_shape(file: IO[bytes] | gzip.GzipFile) -> tuple[int, ...]:
    magic = file.read(4)
    if len(magic) < 4:
        raise DataFileError(f"has only {len(magic)} bytes, an IDX header needs more")
    if magic[:2] != b"\0\0" or not 1 <= magic[3] <= 8:
        raise DataFileError(f"is no IDX file (magic number {magic.hex()})")
    if magic[2] != 0x08:
        raise DataFileError(f"holds IDX type 0x{magic[2]:02x}, only uint8 (0x08) is read here")
    dimensions = file.read(4 * magic[3])
    if len(dimensions) < 4 * magic[3]:
        raise DataFileError(f"ends inside its IDX header ({magic[3]} dimensions announced)")
    return tuple(int.from_bytes(dimensions[i : i + 4], "big") for i in range(0, len(dimensions), 4))


def _mend(path: Path) -> str:
    """The command that makes a file again, found from where `find_mnist` or `find_cifar10` has found it."""
    folder = path.parent
    if folder.name == CIFAR10.folder:
        return prepare_command("cifar10", folder.parent)
    if folder.parts[-2:] == Path(MNIST.folder).parts:
        folder = folder.parent.parent
    elif folder.name == MNIST.name:
        folder = folder.parent
    return prepare_command("mnist", folder)


def fault_of(path: Path, file: DataFile) -> str | None:
    """What is wrong with the unpacked file at `path`: None if size and SHA-256 are right, else words for a message."""
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size != file.size:
                return f"has {size} bytes instead of {file.size}"
            digest = hashlib.sha256()
            while chunk := stream.read(CHUNK_BYTES):
                digest.update(chunk)
    except FileNotFoundError:
        return "is not there"
    except OSError as err:
        return f"cannot be read ({_strerror(err)})"
    return None if digest.hexdigest() == file.sha256 else _sha256_fault(digest.hexdigest(), file)


# ---------------------------------------------------------------- getting a file, all or nothing


def install(place: str, file: DataFile, folder: Path, progress: Callable[[int], None]) -> None:
    """Unpack `place` (a URL or a path; gzip or plain) to `folder`/`file.name`; verified first, then renamed.

    Any number of processes, on any hosts, may do so at once: each writes its own temporary file, and a good file that
    another one has put there meanwhile is kept. `progress` is told the number of unpacked bytes so far.
    Raises FetchError (the source cannot be read), DataFileError (its content is wrong), OSError (cannot be written).
    """
    final = folder / file.name
    with _temporary_file(folder, file.name) as (temporary, out):
        with _open_place(place, file) as stream:
            _unpack(stream, out, file, progress)
        out.flush()
        os.fsync(out.fileno())
        # Over NFS, replacing a file that others have open breaks their reads.
        if fault_of(final, file) is not None:
            os.replace(temporary, final)
            _sync_folder(folder)


def _unpack(stream: io.BufferedReader, out: IO[bytes], file: DataFile, progress: Callable[[int], None]) -> None:
    digest, done = hashlib.sha256(), 0
    with _reading_errors():
        # Looked at, not told by the name: browsers and some proxies unpack a .gz and keep its name.
        packed = not file.keep_packed and stream.peek(1)[:1] == b"\x1f"
    plain = cast(IO[bytes], gzip.GzipFile(fileobj=stream)) if packed else stream
    while True:
        with _reading_errors():
            chunk = plain.read(min(CHUNK_BYTES, file.size + 1 - done))
        if not chunk:
            break
        done += len(chunk)
        if done > file.size:
            raise DataFileError(f"holds more than the {file.size} bytes of {file.name}")
        digest.update(chunk)
        out.write(chunk)
        progress(done)
    if done != file.size:
        raise DataFileError(f"holds {done} bytes instead of {file.size}")
    if digest.hexdigest() != file.sha256:
        raise DataFileError(_sha256_fault(digest.hexdigest(), file))


@contextlib.contextmanager
def _reading_errors() -> Iterator[None]:
    """Tells a source's errors from those of the disk that is written to: both are OSError otherwise."""
    try:
        yield
    except (OSError, EOFError, zlib.error, http.client.HTTPException) as err:
        fault = _content_fault(err)
        raise (DataFileError(fault) if fault else FetchError(brief(err))) from err


@contextlib.contextmanager
def _temporary_file(folder: Path, name: str) -> Iterator[tuple[Path, IO[bytes]]]:
    """An exclusively created file, locked as long as its writer lives; gone at the end unless renamed."""
    while True:
        path = folder / f".{name}.{socket.gethostname()}.{secrets.token_hex(6)}.part"
        with path.open("xb") as out:
            try:
                with contextlib.suppress(OSError):  # no locks on this file system: then age alone tells
                    fcntl.flock(out, fcntl.LOCK_EX)
                if not path.exists():  # swept by another process between its creation and its lock
                    continue
                yield path, out
                return
            finally:
                path.unlink(missing_ok=True)


def remove_stale(folder: Path, dataset: Dataset) -> None:
    """Remove the temporary files that dead processes left in `folder`. Those that may not be removed stay."""
    for file in dataset.files:
        for path in folder.glob(f".{file.name}.*.part"):
            with contextlib.suppress(OSError), path.open("rb+") as handle:
                ours = path.name.startswith(f".{file.name}.{socket.gethostname()}.")
                if ours:  # the lock fails, and so the file stays, if its writer lives
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if ours or time.time() - path.stat().st_mtime > STALE_S:
                    path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot; the rename itself is done
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------- reading from a URL


def check_url(url: str) -> str | None:
    """What speaks against fetching from this base URL: None, or words for a message (that do not repeat the URL)."""
    try:
        parts = urllib.parse.urlsplit(url)
        host = parts.hostname
        _ = parts.port  # raises ValueError when it is no number
    except ValueError as err:
        return f"is no URL ({err})"
    if not host or not url.isascii() or re.search(r"[\s\x00-\x1f\x7f]", url):
        return "is no URL (other characters than ASCII, and spaces, are written as %XX)"
    if "@" in parts.netloc or parts.query or parts.fragment:
        return "carries a password, a query or a fragment, and is a plain base URL only"
    if parts.scheme == "https" or (parts.scheme == "http" and _is_loopback(host)):
        return None
    return f"is {parts.scheme}://, which nobody verifies: use https:// or a folder"


def brief(err: BaseException) -> str:
    """A network error in a few words."""
    if isinstance(err, urllib.error.HTTPError):
        return f"HTTP {err.code} {err.reason}".strip()
    if isinstance(err, urllib.error.URLError):
        return brief(err.reason) if isinstance(err.reason, BaseException) else str(err.reason)
    if isinstance(err, ssl.SSLCertVerificationError):
        return f"certificate not trusted ({err.verify_message}; a site's own authority goes into SSL_CERT_FILE)"
    if isinstance(err, TimeoutError):
        return _strerror(err) if err.args else "timed out"
    if isinstance(err, http.client.IncompleteRead):
        return "the connection was closed in the middle"
    return _strerror(err)


class _Download(io.RawIOBase):
    """A URL's body as a stream that goes on where a dropped connection left off, bounded in bytes and in time."""

    def __init__(self, url: str, limit: int):
        self._url, self._limit = url, limit
        self._deadline = time.monotonic() + TOTAL_S
        self._response: Any = None
        self._received = 0
        self._skip = 0  # bytes to throw away, from a server that starts again although asked for the rest
        self._total: int | None = None
        self._retries_left = RETRIES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            try:
                chunk = self._read_some(len(buffer))
            except (OSError, http.client.HTTPException) as err:
                self._drop(err)
                continue
            if time.monotonic() > self._deadline:
                raise TimeoutError(f"{self._received} bytes within {TOTAL_S:.0f} s, given up")
            skipped = min(self._skip, len(chunk))
            if skipped:
                self._skip -= skipped
                chunk = chunk[skipped:]
                if not chunk:
                    continue
            self._received += len(chunk)
            if self._received > self._limit:
                raise DataFileError(f"sends more than {self._limit} bytes")
            buffer[: len(chunk)] = chunk
            return len(chunk)

    def _read_some(self, size: int) -> bytes:
        if self._response is None:
            self._connect()
        # read1: read() would wait until `size` bytes have come, past any deadline
        chunk: bytes = self._response.read1(size)
        if not chunk and self._total is not None and self._received < self._total:
            raise ConnectionError(f"closed after {self._received} of {self._total} bytes")
        return chunk

    def _connect(self) -> None:
        headers = {"Range": f"bytes={self._received}-"} if self._received else {}
        request = urllib.request.Request(self._url, headers=headers)
        self._response = _opener(self._url).open(request, timeout=TIMEOUT_S)
        start = 0
        if self._response.status == 206:
            match = re.match(r"bytes (\d+)-", self._response.headers.get("Content-Range", ""))
            start = int(match[1]) if match else self._received
            if start > self._received:
                raise ConnectionError(f"sent bytes from {start} on, {self._received} were asked for")
        self._skip = self._received - start
        length = self._response.length  # None when it is chunked or not said
        self._total = None if length is None else start + length
        if self._total is not None and self._total > self._limit:
            raise DataFileError(f"announces {self._total} bytes, at most {self._limit} are expected")

    def _drop(self, err: OSError | http.client.HTTPException) -> None:
        """Close, and return if another try makes sense; else raise `err`."""
        self._close_response()
        if isinstance(err, urllib.error.HTTPError):
            err.close()
            sensible = err.code == 429 or err.code >= 500
        else:  # URLError: the connection was never made, and the next mirror is the better try
            sensible = self._received > 0 or not isinstance(err, urllib.error.URLError)
        if not sensible or self._retries_left == 0 or time.monotonic() > self._deadline:
            raise err
        self._retries_left -= 1
        time.sleep(RETRY_WAIT_S)

    def _close_response(self) -> None:
        if self._response is not None:
            self._response.close()
            self._response = None

    def close(self) -> None:
        self._close_response()
        super().close()


class _VerifiedRedirects(urllib.request.HTTPRedirectHandler):
    """urllib follows a redirect from https to http without a word."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        parts = urllib.parse.urlsplit(newurl)
        if parts.scheme != "https" and not _is_loopback(parts.hostname or ""):
            fp.close()
            raise urllib.error.URLError(f"redirects to {parts.scheme}://{parts.hostname}, which is not https")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opener(url: str) -> urllib.request.OpenerDirector:
    # create_default_context honours SSL_CERT_FILE and SSL_CERT_DIR, and always verifies.
    handlers: list[urllib.request.BaseHandler] = [
        _VerifiedRedirects(),
        urllib.request.HTTPSHandler(context=ssl.create_default_context()),
    ]
    if _is_loopback(urllib.parse.urlsplit(url).hostname or ""):
        handlers.append(urllib.request.ProxyHandler({}))  # a proxy's loopback is another machine
    return urllib.request.build_opener(*handlers)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _open_place(place: str, file: DataFile) -> io.BufferedReader:
    if "://" in place:
        limit = file.size + file.size // 100 + (1 << 16)  # gzip of what cannot be packed grows a little
        return io.BufferedReader(_Download(place, limit), 1 << 16)
    with _reading_errors():
        return Path(place).open("rb")


# ---------------------------------------------------------------- words


def disk_words(err: OSError, folder: Path, need: int) -> str:
    """One line for an error in writing below `folder`, where `need` bytes were wanted: what is wrong, and the mend."""
    if err.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"data_dir: {folder} cannot be written ({err.strerror or err}): choose another data_dir="
    full = "is full" if err.errno == errno.ENOSPC else f"takes no more ({err.strerror})"
    mount = _mount_point(folder)
    free = shutil.disk_usage(folder if folder.exists() else mount).free
    return (
        f"data_dir: the disk at {mount} {full}: {megabytes(need)} needed, {megabytes(free)} free; "
        "make room or choose another data_dir="
    )


def _mount_point(path: Path) -> Path:
    path = Path(os.path.realpath(path))
    while not path.is_mount():
        path = path.parent
    return path


def check_room(folder: Path, need: int) -> None:
    """Raises OSError (ENOSPC) where the disk of `folder` has less than `need` bytes free."""
    usage = shutil.disk_usage(folder)
    if usage.total and usage.free < need:  # some network file systems say 0 of 0
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def megabytes(size: int) -> str:
    """A number of bytes for a person: kB, MB or GB."""
    if size >= 10_000_000_000:
        return f"{size / 1e9:.1f} GB"
    return f"{size / 1e6:.1f} MB" if size >= 100_000 else f"{size / 1e3:.1f} kB"


def _content_fault(err: BaseException) -> str | None:
    """In words, if the error is about a file's content and not about reading it."""
    if isinstance(err, EOFError):
        return "is cut short (gzip without its end)"
    if isinstance(err, gzip.BadGzipFile | zlib.error):
        return f"is damaged ({err})"
    if isinstance(err, urllib.error.HTTPError) and err.code in (404, 410):
        return brief(err)
    return None


def _sha256_fault(found: str, file: DataFile) -> str:
    return f"has the wrong content (SHA-256 {found[:8]}… instead of {file.sha256[:8]}…)"


def _strerror(err: BaseException) -> str:
    text = (err.strerror if isinstance(err, OSError) else None) or str(err) or type(err).__name__
    return " ".join(text.split())
