"""Downloads files over HTTP. Standard library only."""

import hashlib
import http.client
import urllib.request
from pathlib import Path
from typing import IO

from recipes.core import errors, files

TIMEOUT_S = 30.0  # to connect, and for each read
CHUNK_BYTES = 1 << 20


class FetchError(Exception):
    """A URL cannot be downloaded. One line."""


def fetch(url: str, path: Path, sha256: str = "") -> None:
    """Downloads ``url`` to ``path``, which is replaced only by a complete file. TLS is verified; proxies and SSL_CERT_FILE are honoured.

    sha256: the first digits of the file's SHA-256; "" if the caller verifies the file, which may then be incomplete.
    Raises FetchError, and OSError if the disk is full.
    """
    digest = hashlib.sha256()

    def fill(file: IO[bytes]) -> None:
        request = urllib.request.Request(url, headers={"User-Agent": "slurm-torch-recipes"})
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            while chunk := answer.read(CHUNK_BYTES):
                digest.update(chunk)
                file.write(chunk)
        if not digest.hexdigest().startswith(sha256):
            raise FetchError(f"has another SHA-256 than {sha256}…")

    try:
        files.write_whole(path, fill)
    except (OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(error, OSError) and error.errno in files.FULL:
            raise
        raise FetchError(errors.one_line(error)) from None
