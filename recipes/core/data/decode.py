"""Decoders: JPEG bytes to RGB pixels, by torchcodec, torchvision or OpenCV, and by Pillow for what these cannot read."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.nn import functional

from recipes.core.data import pillow
from recipes.core.data.pillow import Unreadable
from recipes.core.errors import InputError, one_line

JPEG_START = b"\xff\xd8"
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # JPEG markers that are followed by the image's size
ALONE = frozenset({0x00, 0x01, *range(0xD0, 0xD9), 0xFF})  # and those without a length
MOST_PIXELS = 178_956_970  # of an image: Pillow's own limit
Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Decoder:
    """decode: gives a JPEG's upright RGB pixels (H, W, 3); raises RuntimeError or ValueError for other content.

    resize: writes its first argument into the second one, at that one's size.
    """

    name: str
    decode: Callable[[bytes], Pixels]
    resize: Callable[[Pixels, Pixels], None]


def make_decoder(name: str) -> Decoder:
    """torchcodec, torchvision: the same pixels as Pillow and torchvision's transforms, within 1. opencv: faster, but other pixels.

    OpenCV resizes without antialiasing, after a faster and coarser inverse DCT. auto: torchcodec where it is installed, else
    torchvision, whose decoders are deprecated since 0.29. Raises InputError where a library is missing.
    """
    if name == "auto":
        try:
            return _torchcodec()
        except InputError:
            return _torchvision()
    return {"torchcodec": _torchcodec, "torchvision": _torchvision, "opencv": _opencv}[name]()


def _torchcodec() -> Decoder:
    try:
        from torchcodec.decoders import decode_jpeg
    except (ImportError, OSError, RuntimeError) as error:  # not installed, or made for another torch
        raise InputError(
            f"decoder=torchcodec: cannot be loaded ({one_line(error, 80)}): pip install 'torchcodec>=0.16', or leave decoder= out"
        ) from None

    def decode(data: bytes) -> Pixels:  # RGB, with EXIF's orientation
        tensor = cast(torch.Tensor, decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8)))
        return tensor.permute(1, 2, 0).numpy()

    return Decoder("torchcodec", decode, _resize)


def _torchvision() -> Decoder:
    import torchvision.io  # registers the operator

    assert torchvision.io
    try:
        # torchvision.io.decode_jpeg itself warns at each call from torchvision 0.29 on, and is not made for threads.
        decode_jpeg = torch.ops.image.decode_jpeg
    except AttributeError:
        raise InputError(
            "decoder=torchvision: this torchvision cannot decode JPEGs: pip install 'torchvision<0.30', or give decoder=opencv"
        ) from None

    def decode(data: bytes) -> Pixels:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return decode_jpeg(tensor, 3, True).permute(1, 2, 0).numpy()  # 3: RGB; True: EXIF's orientation

    return Decoder("torchvision", decode, _resize)


def _resize(pixels: Pixels, out: Pixels) -> None:
    # Contiguous: torch would otherwise copy with its own threads, in each of ours. Writable: torch would otherwise warn.
    # Made a batch of one before the axes are permuted: torch then sees channels_last, and its result needs no transposing.
    source = torch.from_numpy(np.require(pixels, None, ["C", "W"]))[None].permute(0, 3, 1, 2)
    done = functional.interpolate(source, size=out.shape[:2], mode="bilinear", antialias=True)
    out[...] = done[0].permute(1, 2, 0).numpy()


def _opencv() -> Decoder:
    try:
        import cv2
        import simplejpeg
    except ImportError:
        raise InputError(
            "decoder=opencv: needs opencv-python-headless and simplejpeg: pip install opencv-python-headless simplejpeg, "
            "or make install"
        ) from None
    cv2.setNumThreads(1)  # the loader's threads already run in parallel
    decode_jpeg, cv2_resize, linear = simplejpeg.decode_jpeg, cv2.resize, cv2.INTER_LINEAR

    def decode(data: bytes) -> Pixels:
        pixels = decode_jpeg(data, fastdct=True, fastupsample=True)
        return _upright(pixels, data) if b"Exif" in data[:4096] else pixels

    def resize(pixels: Pixels, out: Pixels) -> None:
        cv2_resize(pixels, (out.shape[1], out.shape[0]), out, interpolation=linear)

    return Decoder("opencv", decode, resize)


def _upright(pixels: Pixels, data: bytes) -> Pixels:
    """Applies EXIF's orientation, which simplejpeg does not."""
    image = Image.fromarray(pixels)
    try:
        image.info["exif"] = Image.open(io.BytesIO(data)).info["exif"]
    except Exception:  # damaged EXIF data; the pixels can still be valid
        return pixels
    return np.asarray(pillow.upright(image))


def decode_any(decoder: Decoder, data: bytes) -> Pixels:
    """The pixels of an image, by Pillow where the decoder cannot read it. Raises Unreadable."""
    try:
        if data[:2] != JPEG_START:
            raise ValueError("not a JPEG")
        if _announced(data) > MOST_PIXELS:
            raise Unreadable("has more than 178 million pixels")
        return decoder.decode(data)
    except (RuntimeError, ValueError):
        return np.asarray(pillow.decode(data)[0])


def _announced(data: bytes) -> int:
    """The number of pixels in a JPEG's header, 0 without one. A decoder allocates memory for them before it reads further."""
    at = data.find(b"\xff", 2)
    while 0 <= at <= len(data) - 9:
        if data[at + 1] in FRAMES:
            return int.from_bytes(data[at + 5 : at + 7], "big") * int.from_bytes(data[at + 7 : at + 9], "big")
        at += 1 if data[at + 1] in ALONE else 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        at = data.find(b"\xff", at)
    return 0
