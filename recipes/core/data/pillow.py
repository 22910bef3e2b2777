"""Images through Pillow: decoding every format and colour mode to upright RGB, and encoding for a
packed copy.

Pillow is imported inside the functions: `python -m recipes.prepare` must start without it.
"""

import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.core import errors, files

if TYPE_CHECKING:
    from PIL import Image


FORMATS = ("JPEG", "PNG", "GIF", "BMP", "PPM", "TIFF", "WEBP")
LONGEST = 65500  # pixels of a side: libjpeg's limit
LARGEST = 1 << 30  # bytes of a file


class Unreadable(Exception):
    """An image that is skipped. The message is a clause that follows its name."""


def read_file(path: Path, opener: Callable[[str, int], int] = files.without_waiting) -> bytes:
    """The file's bytes. Raises Unreadable, also for a named pipe or a device in another user's
    folder.
    """
    try:
        return files.read_bounded(path, LARGEST, opener)
    except OSError as error:
        raise Unreadable(f"cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise Unreadable(f"cannot be read ({error})") from None


def encode(data: bytes, size: int, quality: int) -> tuple[bytes, int, int]:
    """An image for a packed copy: payload, height, width. An upright RGB JPEG of at most ``size``
    is unchanged. Raises Unreadable, and MachineError if there is no space for a temporary file.
    """
    from PIL import Image

    small = image = decode(data)
    if min(image.size) > size:
        height, width = resized(image.height, image.width, size)
        small = image.resize((width, height), Image.Resampling.LANCZOS)
    if max(small.size) > LONGEST:
        raise Unreadable(f"is {image.width} x {image.height} pixels: its longer side is too long")
    # Pillow gives a format only to an image that needed no conversion
    if small is image and image.format == "JPEG":
        return data, image.height, image.width
    small.info = {}  # comments and profiles would be stored too
    # only for a file does Pillow release the interpreter's lock
    folder = Path(tempfile.gettempdir())
    with files.writing_to(folder, "TMPDIR"), tempfile.TemporaryFile(dir=folder) as file:
        small.save(file, "JPEG", quality=quality, subsampling="4:2:0")
        file.seek(0)
        return file.read(), small.height, small.width


def decode(data: bytes) -> "Image.Image":
    """The first image in a file's bytes, upright in RGB. Raises Unreadable."""
    from PIL import Image, UnidentifiedImageError

    if not data:
        raise Unreadable("is empty")
    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
        image.load()
    except MemoryError:
        raise
    except UnidentifiedImageError:
        raise Unreadable("is not an image") from None
    except Image.DecompressionBombError:
        raise Unreadable("has more than 178 million pixels") from None
    except Exception as error:  # Pillow's decoders raise many kinds of errors for damaged files
        raise Unreadable(f"is damaged ({errors.one_line(error)})") from None
    return to_rgb(upright(image))


def upright(image: "Image.Image") -> "Image.Image":
    """The image as EXIF's orientation turns it; the same object if it is upright."""
    from PIL import ImageOps

    try:
        return image if image.getexif().get(0x0112, 1) == 1 else ImageOps.exif_transpose(image)
    except Exception:  # damaged EXIF data; the pixels can still be valid
        return image


def to_rgb(image: "Image.Image") -> "Image.Image":
    """The image in RGB. Raises Unreadable for 16-bit and float values, which Pillow's conversion
    would clip at 0 and 255.
    """
    if image.mode.startswith(("I", "F")):
        raise Unreadable("has more than 8 bits per value")
    return image if image.mode == "RGB" else image.convert("RGB")


def resized(height: int, width: int, shorter: int) -> tuple[int, int]:
    """Height and width of an image after its shorter side is resized to ``shorter``, as
    torchvision's Resize.
    """
    if height <= width:
        return shorter, int(shorter * width / height)
    return int(shorter * height / width), shorter
