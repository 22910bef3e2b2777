"""Crops of decoded images: random ones for training, the centre for evaluation; boxes as torchvision draws them."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from recipes.core.data import decode, pillow
from recipes.core.data.decode import Decoder, Pixels
from recipes.core.data.pillow import Unreadable

RATIOS = (3 / 4, 4 / 3)  # width to height of a random crop; as TRIES, from torchvision's RandomResizedCrop
TRIES = 10
Box = tuple[int, int, int, int]  # y, x, height, width
# Writes a crop of the pixels of image i of a batch into the last argument.
Crop = Callable[[Decoder, Pixels, int, Pixels], None]


def random_box(uniform: Sequence[float], height: int, width: int, least: float) -> Box:
    """torchvision's RandomResizedCrop from uniform numbers: two for each try, and two for the position.

    least: smallest fraction of the area. Where no try fits: the largest centred box with a valid ratio.
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


def random_crop(uniform: Tensor, least: float) -> Crop:
    """A random box of each image, resized. uniform: row i has the numbers for the `random_box` of image i of the batch."""
    rows = uniform.tolist()

    def crop(decoder: Decoder, pixels: Pixels, i: int, out: Pixels) -> None:
        y, x, h, w = random_box(rows[i], pixels.shape[0], pixels.shape[1], least)
        decoder.resize(pixels[y : y + h, x : x + w], out)

    return crop


def centre_crop(shorter: int) -> Crop:
    """The centre of each image after its shorter side is resized to ``shorter``, as torchvision's Resize and CenterCrop."""

    def crop(decoder: Decoder, pixels: Pixels, i: int, out: Pixels) -> None:
        height, width = pillow.resized(pixels.shape[0], pixels.shape[1], shorter)
        if height * width > decode.MOST_PIXELS:
            raise Unreadable(f"is {pixels.shape[1]} x {pixels.shape[0]} pixels: too long for its width")
        if (height, width) != pixels.shape[:2]:
            whole = np.empty((height, width, 3), np.uint8)
            decoder.resize(pixels, whole)
            pixels = whole
        # round() as in torchvision's center_crop, which prefers the even one of two centres
        y, x = round((height - out.shape[0]) / 2), round((width - out.shape[1]) / 2)
        out[...] = pixels[y : y + out.shape[0], x : x + out.shape[1]]

    return crop
