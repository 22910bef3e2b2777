"""Fetches files whose size and SHA-256 are known, from URLs or local copies. Standard library only.

The SHA-256 decides whether a file is valid, whatever server it is from. So all that remains is to bound the bytes and the time,
to retry, and to give a file its name only when it is complete.
"""

import functools
import hashlib
import http.client
import re
import ssl
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from recipes.core import files
from recipes.core.data import datasets
from recipes.core.data.datasets import DataFile, DataFileError
from recipes.core.errors import InputError, MachineError

CHUNK_BYTES = 1 << 20
TIMEOUT_S = 30.0  # to connect, and for each read
TOTAL_S = 1800.0  # for one file from one URL
ATTEMPTS = 3  # for each URL
RETRY_WAIT_S = 1.0
# Printable ASCII without user, query and fragment. http only on this machine: a proxy on the way may change other http answers.
URL = re.compile(
    r"(https://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])|http://(localhost|127\.0\.0\.1|\[::1\]))(:\d{1,5})?(/[!-\"$->A-~]*)?"
)


class FetchError(Exception):
    """A source cannot be read: network, TLS, timeout, an unreadable local file. One line. retry: it may succeed later."""

    def __init__(self, text: str, retry: bool = False):
        super().__init__(text)
        self.retry = retry


def check_url(url: str) -> None:
    """Raises InputError for what is not a plain base URL."""
    if not URL.fullmatch(url):
        shown = "" if "@" in url or "?" in url else repr(url)  # it may have a password
        raise InputError(
            f"source={shown}: is not a plain base URL: give https://HOST/PATH/, without user, query or fragment, in ASCII"
        )


def fetch(
    file: DataFile,
    sources: list[str],
    folder: Path,
    *,
    unpack: bool,
    say: Callable[[str], None],
    progress: Callable[[DataFile, int], None],
    given: bool = False,
) -> str:
    """Writes ``file`` to ``folder`` from the first of ``sources`` (URLs and paths) that has it, and gives that source.

    unpack: gzip content is unpacked. say: gets lines for the user. progress: gets the bytes written so far. given: the user chose the
    source. Raises InputError (a given source has an invalid file), MachineError (no source can be read) and OSError (cannot be written).
    """
    faults: dict[str, DataFileError | FetchError] = {}
    remaining = list(sources)
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(RETRY_WAIT_S)
        for source in remaining:
            say(f"{file.name}: from {source}")
            try:
                chunks = _chunks(source, file)
                content = _unpacked(chunks, file) if unpack else chunks
                files.write_whole(folder / file.name, functools.partial(_write, content, file, progress))
            except (DataFileError, FetchError) as error:
                faults[source] = error
                say(f"{file.name}: {error}")
            else:
                say(f"{file.name}: verified, {files.size_text(file.size)}")
                return source
        remaining = [source for source in remaining if getattr(faults[source], "retry", False)]
        if not remaining:
            break
    tried = "; ".join(f"{source}: {fault}" for source, fault in faults.items())
    if given and all(isinstance(fault, DataFileError) for fault in faults.values()):
        raise InputError(f"source= has no valid copy of {file.name} ({tried}): give another source=")
    raise MachineError(
        f"no valid copy of {file.name} could be fetched ({tried}): run this where there is internet (a login node), "
        "set HTTPS_PROXY if the site has a proxy, or give source= a folder that has the files"
    )


def _write(content: Iterator[bytes], file: DataFile, progress: Callable[[DataFile, int], None], out: IO[bytes]) -> None:
    """Writes and verifies the content. Raises DataFileError."""
    digest, done = hashlib.sha256(), 0
    for chunk in content:
        done += len(chunk)
        if done > file.size:
            raise DataFileError(f"has more than the {file.size} bytes of {file.name}")
        digest.update(chunk)
        out.write(chunk)
        progress(file, done)
    if done != file.size:
        raise DataFileError(f"has {done} bytes instead of {file.size}")
    if fault := datasets.sha256_fault(digest.hexdigest(), file):
        raise DataFileError(fault)


def _unpacked(chunks: Iterator[bytes], file: DataFile) -> Iterator[bytes]:
    """The content of a gzip stream, at most one byte more than the file has; other content unchanged.

    The first byte decides, not the name: browsers and some proxies unpack a .gz and keep its name. Raises DataFileError.
    """
    first = next(chunks, b"")
    if first[:1] != b"\x1f":
        yield first
        yield from chunks
        return
    gzip, done = zlib.decompressobj(wbits=31), 0
    try:
        yield (content := gzip.decompress(first, file.size + 1))
        done += len(content)
        for chunk in chunks:
            yield (content := gzip.decompress(chunk, file.size + 1 - done))
            done += len(content)
    except zlib.error as error:
        raise DataFileError(f"is damaged ({error})") from None
    if not gzip.eof:
        raise DataFileError("is truncated (gzip without its end)")


def _chunks(source: str, file: DataFile) -> Iterator[bytes]:
    """The content of a URL or a local file. Raises DataFileError and FetchError."""
    try:
        if "://" in source:
            yield from _body(source, file.size + file.size // 100 + (1 << 16))  # gzip can enlarge a file a little
        else:
            with open(source, "rb") as local:
                while chunk := local.read(CHUNK_BYTES):
                    yield chunk
    except urllib.error.HTTPError as error:
        if error.code in (404, 410):
            raise DataFileError(describe(error)) from None
        raise FetchError(describe(error), retry=error.code == 429 or error.code >= 500) from None
    except (OSError, http.client.HTTPException) as error:
        retry = "://" in source and not isinstance(error, urllib.error.URLError)  # URLError: no connection was made
        raise FetchError(describe(error), retry) from None


def _body(url: str, limit: int) -> Iterator[bytes]:
    """The body of ``url``, at most ``limit`` bytes. TLS is verified; proxies and SSL_CERT_FILE are honoured."""
    deadline, received = time.monotonic() + TOTAL_S, 0
    # Not urlopen, which keeps the proxies and certificates of its first call.
    try:
        opened = urllib.request.build_opener().open(url, timeout=TIMEOUT_S)
    except ValueError as error:
        raise FetchError(f"redirects to an invalid URL ({error})") from None
    with opened as response:
        if (response.length or 0) > limit:
            raise DataFileError(f"announces {response.length} bytes, at most {limit} are expected")
        while chunk := response.read1(CHUNK_BYTES):  # read() would block until all of CHUNK_BYTES have arrived
            received += len(chunk)
            if received > limit:
                raise DataFileError(f"sends more than {limit} bytes")
            if time.monotonic() > deadline:
                raise FetchError(f"too slow: {received} bytes in {TOTAL_S:g} s")
            yield chunk
        if response.length:
            raise ConnectionError(f"closed with {response.length} bytes missing")


def describe(error: BaseException) -> str:
    """A network error in a few words."""
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code} {error.reason}".strip()
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, BaseException):
        return describe(error.reason)
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate not trusted ({error.verify_message}; set SSL_CERT_FILE for a site's own authority)"
    text = (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__
    return " ".join(text.split())
