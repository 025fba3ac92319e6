"""What the objects hold: random bytes, or JPEGs made here."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Final

import numpy as np

from kvio import MiB, UnsupportedError

KINDS: Final = ("random", "jpeg")
_SEED: Final = 20260104
#: Payloads that differ, so that an object's bytes are not another's by chance.
_MOST_DISTINCT: Final = 8
_MOST_NBYTES: Final = 64 * MiB
_PIXELS: Final = 480


def write(path: Path, kind: str, nbytes: int) -> int:
    """Write different payloads of *nbytes* each into a file, and say how many.

    A JPEG is cut, or repeated, to the object's size.

    Raises:
        UnsupportedError: there is nothing to make JPEGs with.
    """
    distinct = max(2, min(_MOST_DISTINCT, _MOST_NBYTES // nbytes))
    with open(path, "wb") as file:
        for index in range(distinct):
            file.write(_jpeg(index, nbytes) if kind == "jpeg" else _noise(index, nbytes))
    return distinct


def _noise(index: int, nbytes: int) -> bytes:
    return random.Random(_SEED + index).randbytes(nbytes)  # noqa: S311  # not secret


def _jpeg(index: int, nbytes: int) -> bytes:
    try:
        from matplotlib import image
    except ImportError:
        raise UnsupportedError("no JPEG: matplotlib is not installed") from None
    numbers = np.random.default_rng(_SEED + index)
    y, x = np.mgrid[0:_PIXELS, 0:_PIXELS] / _PIXELS
    waves = [np.sin(numbers.uniform(2, 20) * x + numbers.uniform(2, 20) * y) for _ in range(3)]
    picture = np.stack(waves, axis=-1) / 4 + 0.5 + numbers.normal(0, 0.05, (_PIXELS, _PIXELS, 3))
    file = io.BytesIO()
    image.imsave(file, np.clip(picture, 0, 1), format="jpeg")
    made = file.getvalue()
    return (made * (nbytes // len(made) + 1))[:nbytes]
