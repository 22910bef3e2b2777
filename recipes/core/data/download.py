"""Downloads files with torch.hub. Works without torch until something is downloaded."""

import http.client
import socket
import sys
from pathlib import Path

from recipes.core import errors, files

TIMEOUT_S = 30.0  # to connect, and for each read


class FetchError(Exception):
    """A URL cannot be downloaded. One line."""


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
        raise FetchError(errors.one_line(error)) from None
    finally:
        socket.setdefaulttimeout(before)
