"""Crops of decoded images: random ones for training, the centre for evaluation; boxes as torchvision draws them."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from recipes.core.data import decode
from recipes.core.data.decode import Decoder, Pixels
from recipes.core.data.image_sets import Images
from recipes.core.data.pillow import Unreadable

RATIOS = (3 / 4, 4 / 3)  # of width to height, of a random crop; these and TRIES as in torchvision's RandomResizedCrop
TRIES = 10
Box = tuple[int, int, int, int]  # y, x, height, width


def random_box(uniform: Sequence[float], height: int, width: int, least: float) -> Box:
    """torchvision's RandomResizedCrop from uniform numbers: two for each of its tries, and two for the place.

    least: the smallest share of the area. Where no try fits, the largest middle part whose ratio is allowed.
    """
    area, low, span = height * width, math.log(RATIOS[0]), math.log(RATIOS[1] / RATIOS[0])
    for i in range(0, 2 * TRIES, 2):
        target = area * (least + (1 - least) * uniform[i])
        ratio = math.exp(low + span * uniform[i + 1])
        w, h = round(math.sqrt(target * ratio)), round(math.sqrt(target / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(uniform[2 * TRIES] * (height - h + 1)), int(uniform[2 * TRIES + 1] * (width - w + 1)), h, w
    h, w = height, width
    if width < RATIOS[0] * height:
        h = min(height, round(width / RATIOS[0]))
    elif width > RATIOS[1] * height:
        w = min(width, round(height * RATIOS[1]))
    return (height - h) // 2, (width - w) // 2, h, w


def resized(height: int, width: int, shorter: int) -> tuple[int, int]:
    """Height and width of an image whose shorter side becomes ``shorter``: torchvision's Resize."""
    if height <= width:
        return shorter, int(shorter * width / height)
    return int(shorter * height / width), shorter


class RandomCrop:
    """A box of each image, drawn for the whole global batch. Row i of ``uniform``: `random_box`'s numbers for sample i."""

    def __init__(self, uniform: Tensor, least: float) -> None:
        self._uniform, self._least = uniform.tolist(), least

    def __call__(self, images: Images, decoder: Decoder, sample: int, i: int, out: Pixels) -> str:
        uniform, least = self._uniform[i], self._least
        if images.raw:
            y, x, h, w = random_box(uniform, *images.shape(sample), least)
            decoder.resize(images.rows(sample, y, h)[:, x : x + w], out)
            return ""
        pixels, odd = decode._decoded(decoder, images.read(sample))
        y, x, h, w = random_box(uniform, pixels.shape[0], pixels.shape[1], least)
        decoder.resize(pixels[y : y + h, x : x + w], out)
        return odd


class CentreCrop:
    """The middle of each image whose shorter side is brought to ``shorter`` before: torchvision's Resize and CenterCrop."""

    def __init__(self, shorter: int) -> None:
        self._shorter = shorter

    def __call__(self, images: Images, decoder: Decoder, sample: int, i: int, out: Pixels) -> str:
        if images.raw:
            pixels, odd = images.rows(sample, 0, images.shape(sample)[0]), ""
        else:
            pixels, odd = decode._decoded(decoder, images.read(sample))
        height, width = resized(pixels.shape[0], pixels.shape[1], self._shorter)
        if height * width > decode.MOST_PIXELS:
            raise Unreadable(f"is {pixels.shape[1]} x {pixels.shape[0]} pixels: too long for its width")
        if (height, width) != pixels.shape[:2]:
            whole = np.empty((height, width, 3), np.uint8)
            decoder.resize(pixels, whole)
            pixels = whole
        # round() as torchvision's center_crop has it: of two middles, the even one
        y, x = round((height - out.shape[0]) / 2), round((width - out.shape[1]) / 2)
        out[...] = pixels[y : y + out.shape[0], x : x + out.shape[1]]
        return odd


Crop = Callable[[Images, Decoder, int, int, Pixels], str]
