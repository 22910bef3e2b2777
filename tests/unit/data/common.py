"""Images for the tests of data, a folder that any user can reach, and a user other than root."""

import contextlib
import io
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image


def picture(seed: int, width: int = 120, height: int = 90, grain: int = 8) -> Image.Image:
    """Smooth noise of grain x grain values: decoders and resizing give nearly the same pixels."""
    noise = np.random.default_rng(seed).integers(0, 256, (grain, grain, 3), np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, form: str = "JPEG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **{"quality": 95, **options} if form == "JPEG" else options)
    return buffer.getvalue()


def put(path: Path, content: bytes = b"x") -> None:
    """Writes a file, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


@pytest.fixture(params=["torchcodec", "torchvision", "opencv"])
def decoder(request: pytest.FixtureRequest) -> str:
    if request.param == "torchcodec":
        cuda = torch.version.cuda
        if cuda and int(cuda.partition(".")[0]) < 13:  # its import would raise OSError
            pytest.skip(f"torchcodec 0.16 requires CUDA 13, and torch has CUDA {cuda}")
        pytest.importorskip("torchcodec", reason="decoder=torchcodec: pip install torchcodec")
    if request.param == "opencv":
        pytest.importorskip("cv2", reason="decoder=opencv: pip install opencv-python-headless")
        pytest.importorskip("simplejpeg", reason="decoder=opencv: pip install simplejpeg")
    return str(request.param)


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A folder that users other than root can reach. pytest's own cannot be reached."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        os.chmod(name, 0o755)
        yield Path(name)


@contextlib.contextmanager
def not_root() -> Iterator[None]:
    """Runs the ``with`` block as another user, since root may read everything."""
    before = os.geteuid()
    os.seteuid(before or 65534)
    try:
        yield
    finally:
        os.seteuid(before)
