"""Downloads files with torch.hub, and reads files whose SHA-256 is known. Works without torch until something is downloaded."""

import gzip
import hashlib
import http.client
import re
import socket
import ssl
import sys
import urllib.error
import zlib
from pathlib import Path

from recipes.core import files
from recipes.core.data import datasets
from recipes.core.data.datasets import DataFile, DataFileError
from recipes.core.errors import InputError

TIMEOUT_S = 30.0  # to connect, and for each read
# Printable ASCII without user, query and fragment. http only on this machine: a proxy on the way may change other http answers.
URL = re.compile(
    r"(https://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])|http://(localhost|127\.0\.0\.1|\[::1\]))(:\d{1,5})?(/[!-\"$->A-~]*)?"
)


class FetchError(Exception):
    """A URL cannot be downloaded. One line."""


def check_url(url: str) -> None:
    """Raises InputError for what is not a plain base URL."""
    if not URL.fullmatch(url):
        shown = "" if "@" in url or "?" in url else repr(url)  # it may have a password
        raise InputError(
            f"source={shown}: is not a plain base URL: give https://HOST/PATH/, without user, query or fragment, in ASCII"
        )


def fetch(url: str, path: Path, sha256: str = "") -> None:
    """Downloads ``url`` to ``path``, which is replaced only by a complete file. TLS is verified; proxies and SSL_CERT_FILE are honoured.

    sha256: the first digits of the file's SHA-256; "" if the caller verifies the file, which may then be incomplete.
    Raises FetchError, and OSError if the disk is full.
    """
    import torch

    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT_S)  # torch.hub sets none
    try:
        torch.hub.download_url_to_file(url, str(path), sha256 or None, sys.stderr.isatty())
    except (OSError, RuntimeError, ValueError, http.client.HTTPException) as error:
        if isinstance(error, OSError) and error.errno in files.FULL:
            raise
        raise FetchError(describe(error)) from None
    finally:
        socket.setdefaulttimeout(before)


def read(path: Path, file: DataFile) -> bytes:
    """The content of ``file`` from a copy, plain or gzip. Raises DataFileError if the copy is damaged or cannot be read.

    The first byte decides, not the name: browsers and some proxies unpack a .gz and keep its name.
    """
    try:
        with path.open("rb") as plain:
            packed = plain.read(1) == b"\x1f"
            plain.seek(0)
            with gzip.open(plain) if packed else plain as content:
                found = content.read(file.size + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataFileError(f"is damaged ({error})") from None
    except OSError as error:
        raise DataFileError(f"cannot be read ({error.strerror})") from None
    if fault := datasets.content_fault(len(found), hashlib.sha256(found).hexdigest(), file):
        raise DataFileError(fault)
    return found


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
