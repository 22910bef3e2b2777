"""Decodes JPEGs by torchcodec, torchvision or OpenCV, and what these cannot read by Pillow; crops
as torchvision's transforms do.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torchvision.transforms import RandomResizedCrop

from recipes.core.data import pillow
from recipes.core.errors import InputError, one_line, require

# JPEG markers that are followed by the image's size
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
ALONE = frozenset({0x00, 0x01, *range(0xD0, 0xD9), 0xFF})  # JPEG markers without a length
MOST_PIXELS = 178_956_970  # of an image: Pillow's own limit
RATIOS = [3 / 4, 4 / 3]  # width to height of a random crop, from torchvision's RandomResizedCrop
Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Decoder:
    """decode: returns a JPEG's upright RGB pixels (H, W, 3); raises RuntimeError or ValueError for
    other content.

    resize: scales an image to a height and a width; returns new memory.
    """

    name: str
    decode: Callable[[bytes], Pixels]
    resize: Callable[[Pixels, int, int], Pixels]


def make_decoder(name: str) -> Decoder:
    """torchcodec, torchvision: the same pixels as Pillow and torchvision's transforms, within 1.
    opencv: faster, but other pixels.

    OpenCV resizes without antialiasing, after a faster and coarser inverse DCT. auto: torchcodec if
    it is installed, else torchvision, whose decoders are deprecated since 0.29. Raises InputError
    if a library is missing.
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
    # not installed, or made for another torch
    except (ImportError, OSError, RuntimeError) as error:
        why = one_line(error, 80)
        fix = "pip install 'torchcodec>=0.16', or leave decoder= out"
        raise InputError(f"decoder=torchcodec: cannot be loaded ({why}): {fix}") from None
    return _of_torch("torchcodec", decode_jpeg)  # RGB, with EXIF's orientation


def _torchvision() -> Decoder:
    import torchvision.io  # noqa: F401 (it registers the operator)

    try:
        # torchvision.io.decode_jpeg itself warns at each call from torchvision 0.29 on, and is not
        # made for threads.
        decode_jpeg = torch.ops.image.decode_jpeg
    except AttributeError:
        raise InputError(
            "decoder=torchvision: this torchvision cannot decode JPEGs: "
            "pip install 'torchvision<0.30', or give decoder=opencv"
        ) from None
    # 3: RGB; True: EXIF's orientation
    return _of_torch("torchvision", lambda content: decode_jpeg(content, 3, True))


def _of_torch(name: str, decode_jpeg: Callable[[Tensor], Any]) -> Decoder:
    """decode_jpeg: from a file's bytes, a uint8 tensor, to one of pixels, (3, H, W)."""

    def decode(data: bytes) -> Pixels:
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return decode_jpeg(content).permute(1, 2, 0).numpy()

    return Decoder(name, decode, _resize)


def _resize(pixels: Pixels, height: int, width: int) -> Pixels:
    # Contiguous: torch would otherwise copy with its own threads. Writable: torch would otherwise
    # warn. Made a batch of one before the axes are permuted: torch then sees channels_last, and its
    # result needs no transposing.
    source = torch.from_numpy(np.require(pixels, None, ["C", "W"]))[None].permute(0, 3, 1, 2)
    done = interpolate(source, size=(height, width), mode="bilinear", antialias=True)
    return done[0].permute(1, 2, 0).numpy()


def _opencv() -> Decoder:
    cv2, simplejpeg = (require(name, "fast", "decoder=opencv: ") for name in ("cv2", "simplejpeg"))
    cv2.setNumThreads(1)  # the loader's workers already run in parallel

    def decode(data: bytes) -> Pixels:
        if b"Exif" in data[:4096]:  # simplejpeg does not apply its orientation
            return np.asarray(pillow.decode(data))
        return simplejpeg.decode_jpeg(data, fastdct=True, fastupsample=True)

    def resize(pixels: Pixels, height: int, width: int) -> Pixels:
        return cv2.resize(pixels, (width, height), interpolation=cv2.INTER_LINEAR)

    return Decoder("opencv", decode, resize)


def decode_any(decoder: Decoder, data: bytes) -> Pixels:
    """The pixels of an image, by Pillow if the decoder cannot read it. Raises Unreadable."""
    try:
        if data[:2] != b"\xff\xd8":
            raise ValueError("not a JPEG")
        if _announced(data) > MOST_PIXELS:
            raise pillow.Unreadable("has more than 178 million pixels")
        return decoder.decode(data)
    except (RuntimeError, ValueError):
        return np.asarray(pillow.decode(data))


def _announced(data: bytes) -> int:
    """The number of pixels that a JPEG's header states; 0 without a header. A decoder allocates
    memory for so many before it reads on.
    """
    at = data.find(b"\xff", 2)
    while 0 <= at <= len(data) - 9:
        if data[at + 1] in FRAMES:
            height, width = struct.unpack_from(">HH", data, at + 5)
            return int(height * width)
        at += 1 if data[at + 1] in ALONE else 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        at = data.find(b"\xff", at)
    return 0


def random_crop(decoder: Decoder, pixels: Pixels, side: int, least: float, flip: bool) -> Pixels:
    """The box of torchvision's RandomResizedCrop, resized; with ``flip``, mirrored in half of the
    cases.

    least: smallest fraction of the image's area. The random numbers are those of torch's global
    generator.
    """
    shape = torch.empty(()).expand(3, *pixels.shape[:2])
    y, x, h, w = RandomResizedCrop.get_params(shape, [least, 1.0], RATIOS)
    crop = decoder.resize(pixels[y : y + h, x : x + w], side, side)
    return crop[:, ::-1].copy() if flip and torch.rand(()) < 0.5 else crop


def centre_crop(decoder: Decoder, pixels: Pixels, side: int, shorter: int) -> Pixels:
    """The centre of the image after its shorter side is resized to ``shorter``, as torchvision's
    Resize and CenterCrop.
    """
    before = pixels.shape[:2]
    height, width = pillow.resized(before[0], before[1], shorter)
    if height * width > MOST_PIXELS:
        raise pillow.Unreadable(f"is {before[1]} x {before[0]} pixels: its longer side is too long")
    if (height, width) != before:
        pixels = decoder.resize(pixels, height, width)
    # round() as in torchvision's center_crop, which prefers the even one of two centres
    y = round((height - side) / 2)
    x = round((width - side) / 2)
    return pixels[y : y + side, x : x + side].copy()  # Pillow's pixels are read-only
