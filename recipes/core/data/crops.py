"""Crops of decoded images: random ones for training, the centre for evaluation; boxes as torchvision draws them."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from recipes.core.data import decode, pillow
from recipes.core.data.decode import Decoder, Pixels
from recipes.core.data.image_sets import Images
from recipes.core.data.pillow import Unreadable

RATIOS = (3 / 4, 4 / 3)  # width to height of a random crop; as TRIES, from torchvision's RandomResizedCrop
TRIES = 10
Box = tuple[int, int, int, int]  # y, x, height, width


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


class RandomCrop:
    """A random box of each image, resized. uniform: row i has the numbers for sample i's `random_box`."""

    def __init__(self, uniform: Tensor, least: float) -> None:
        self._uniform, self._least = uniform.tolist(), least

    def __call__(self, images: Images, decoder: Decoder, sample: int, i: int, out: Pixels) -> None:
        pixels = decode.decode_any(decoder, images.read(sample))
        y, x, h, w = random_box(self._uniform[i], pixels.shape[0], pixels.shape[1], self._least)
        decoder.resize(pixels[y : y + h, x : x + w], out)


class CentreCrop:
    """The centre of each image after its shorter side is resized to ``shorter``, as torchvision's Resize and CenterCrop."""

    def __init__(self, shorter: int) -> None:
        self._shorter = shorter

    def __call__(self, images: Images, decoder: Decoder, sample: int, i: int, out: Pixels) -> None:
        pixels = decode.decode_any(decoder, images.read(sample))
        height, width = pillow.resized(pixels.shape[0], pixels.shape[1], self._shorter)
        if height * width > decode.MOST_PIXELS:
            raise Unreadable(f"is {pixels.shape[1]} x {pixels.shape[0]} pixels: too long for its width")
        if (height, width) != pixels.shape[:2]:
            whole = np.empty((height, width, 3), np.uint8)
            decoder.resize(pixels, whole)
            pixels = whole
        # round() as in torchvision's center_crop, which prefers the even one of two centres
        y, x = round((height - out.shape[0]) / 2), round((width - out.shape[1]) / 2)
        out[...] = pixels[y : y + out.shape[0], x : x + out.shape[1]]


Crop = Callable[[Images, Decoder, int, int, Pixels], None]
