"""The S3 libraries that scenarios compare, and what is installed of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from importlib import metadata
from typing import Final

#: The library's name in kvio's URLs, and the module that it is imported as.
LIBRARIES: Final = {
    "boto3": "boto3",
    "minio": "minio",
    "obstore": "obstore",
    "s3dlio": "s3dlio",
    "torch": "s3torchconnectorclient",
}


def missing(library: str) -> str | None:
    """Return what must be installed for a library; None: nothing."""
    module = LIBRARIES[library]
    if importlib.util.find_spec(module) is not None:
        return None
    return f"needs {module} (pip install 'kvio[s3-{library}]')"


def versions(names: Sequence[str]) -> dict[str, str]:
    """Return the versions of those distributions that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
