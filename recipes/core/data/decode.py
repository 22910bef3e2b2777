"""Decoders: JPEG bytes to RGB pixels, by torchvision or OpenCV, and by Pillow for what these cannot read."""

import io
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed
from torch.nn import functional

from recipes.core.data import pillow
from recipes.core.data.pillow import Unreadable
from recipes.core.errors import InputError

JPEG_START = b"\xff\xd8"
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # of JPEG's markers, those that a size follows
ALONE = frozenset({0x00, 0x01, *range(0xD0, 0xD9), 0xFF})  # and what no length follows
MOST_PIXELS = 178_956_970  # of an image: Pillow's own limit
Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Decoder:
    """decode: a JPEG to upright RGB pixels (H, W, 3); raises RuntimeError or ValueError for what it does not read.

    resize: pixels brought to the size of its second argument, and written there.
    """

    name: str
    decode: Callable[[bytes], Pixels]
    resize: Callable[[Pixels, Pixels], None]


def make_decoder(name: str) -> Decoder:
    """torchvision: the pixels of Pillow and torchvision's transforms, to a unit. opencv: faster, other pixels.

    The other pixels are OpenCV's bilinear ones, which are not antialiased, of a faster and coarser inverse DCT. Raises
    InputError where a library is missing.
    """
    return _opencv() if name == "opencv" else _torchvision()


def _torchvision() -> Decoder:
    import torchvision.io  # registers the operator

    assert torchvision.io
    try:
        # What torchvision.io.decode_jpeg calls; that itself warns at each call from 0.29 on, and does not know of threads.
        decode_jpeg = torch.ops.image.decode_jpeg
    except AttributeError:
        raise InputError(
            "decoder=torchvision: this torchvision decodes no JPEGs: pip install 'torchvision<0.30', or give decoder=opencv"
        ) from None

    def decode(data: bytes) -> Pixels:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return decode_jpeg(tensor, 3, True).permute(1, 2, 0).numpy()  # 3: RGB; True: EXIF's orientation

    def resize(pixels: Pixels, out: Pixels) -> None:
        # In one piece: torch would copy it into one with threads of its own, as many again for each of ours. Writable: else it warns.
        source = torch.from_numpy(np.require(pixels, None, ["C", "W"])).permute(2, 0, 1)[None]
        done = functional.interpolate(source, size=out.shape[:2], mode="bilinear", antialias=True)
        out[...] = done[0].permute(1, 2, 0).numpy()

    return Decoder("torchvision", decode, resize)


def _opencv() -> Decoder:
    try:
        import cv2
        import simplejpeg
    except ImportError:
        raise InputError(
            "decoder=opencv: wants opencv-python-headless and simplejpeg: pip install opencv-python-headless simplejpeg, "
            "or make install"
        ) from None
    cv2.setNumThreads(1)  # one image is too little to share; the loader's threads are what runs side by side
    decode_jpeg, cv2_resize, linear = simplejpeg.decode_jpeg, cv2.resize, cv2.INTER_LINEAR

    def decode(data: bytes) -> Pixels:
        pixels = decode_jpeg(data, fastdct=True, fastupsample=True)
        return _upright(pixels, data) if b"Exif" in data[:4096] else pixels

    def resize(pixels: Pixels, out: Pixels) -> None:
        cv2_resize(pixels, (out.shape[1], out.shape[0]), out, interpolation=linear)

    return Decoder("opencv", decode, resize)


def _upright(pixels: Pixels, data: bytes) -> Pixels:
    """Turned and mirrored as EXIF's orientation wants it."""
    from PIL import Image

    try:
        orientation = Image.open(io.BytesIO(data)).getexif().get(0x0112, 1)
    except Exception:  # damaged EXIF data: the pixels are good all the same
        return pixels
    if orientation in (5, 6, 7, 8):
        pixels = pixels.transpose(1, 0, 2)
    down, right = orientation in (3, 4, 7, 8), orientation in (2, 3, 6, 7)
    return np.ascontiguousarray(pixels[:: -1 if down else 1, :: -1 if right else 1])


def _pillow(data: bytes) -> tuple[Pixels, str]:
    """What Pillow makes of an image, converted as `packing` does, and what is odd about it. Raises Unreadable."""
    content, height, width, kinds = pillow.encode(data, "raw", 1 << 30, 0)
    return np.frombuffer(content, np.uint8).reshape(height, width, 3), ", ".join(kinds)


def _decoded(decoder: Decoder, data: bytes) -> tuple[Pixels, str]:
    """Pixels, and what is odd about an image that the decoder does not read and Pillow does. Raises Unreadable."""
    try:
        if data[:2] != JPEG_START:
            raise ValueError("no JPEG")
        if _announced(data) > MOST_PIXELS:
            raise Unreadable("has more than 178 million pixels")
        return decoder.decode(data), ""
    except (RuntimeError, ValueError) as error:
        pixels, kinds = _pillow(data)
        return pixels, kinds or f"{type(error).__name__}: {error}".splitlines()[0][:80]


def _announced(data: bytes) -> int:
    """The pixels that a JPEG's header announces, for which a decoder takes memory before it looks further; 0 where it has none."""
    at = data.find(b"\xff", 2)
    while 0 <= at <= len(data) - 9:
        if data[at + 1] in FRAMES:
            return int.from_bytes(data[at + 5 : at + 7], "big") * int.from_bytes(data[at + 7 : at + 9], "big")
        at += 1 if data[at + 1] in ALONE else 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        at = data.find(b"\xff", at)
    return 0
