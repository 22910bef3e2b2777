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
import os
import re
import secrets
import shutil
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from recipes.core.data import datasets
from recipes.core.data.datasets import DataFile, DataFileError, Dataset
from recipes.core import files

TIMEOUT_S = 30.0  # to connect, and for each read
TOTAL_S = 1800.0  # for one file from one mirror, so that a mirror that drips cannot hold us for ever
RETRIES = 3
RETRY_WAIT_S = 1.0
STALE_S = 86400.0  # another host's temporary file is left alone for so long: its locks may not be seen from here


class FetchError(Exception):
    """A source could not be read: network, TLS, timeout, or an unreadable local file. One line, in brief."""


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
        if datasets.fault_of(final, file) is not None:
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
            chunk = plain.read(min(datasets.CHUNK_BYTES, file.size + 1 - done))
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
        raise DataFileError(datasets._sha256_fault(digest.hexdigest(), file))


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
        return datasets._strerror(err) if err.args else "timed out"
    if isinstance(err, http.client.IncompleteRead):
        return "the connection was closed in the middle"
    return datasets._strerror(err)


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
        f"data_dir: the disk at {mount} {full}: {files.size_text(need)} needed, {files.size_text(free)} free; "
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


def _content_fault(err: BaseException) -> str | None:
    """In words, if the error is about a file's content and not about reading it."""
    if isinstance(err, EOFError):
        return "is cut short (gzip without its end)"
    if isinstance(err, gzip.BadGzipFile | zlib.error):
        return f"is damaged ({err})"
    if isinstance(err, urllib.error.HTTPError) and err.code in (404, 410):
        return brief(err)
    return None
