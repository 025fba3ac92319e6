"""Which DLIO this is, told by what it has; one that is not known is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvio.errors import UnsupportedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """A DLIO this connector knows.

    Attributes:
        name: as its README has it.
        putting: formats whose generators hand bytes to the storage; the others write files.
    """

    name: str
    putting: frozenset[str] = frozenset()


_PUTTING_AT_HEAD: Final = frozenset({"npz", "npy", "jpeg", "png"})
_PUTTING_IN_FORK: Final = _PUTTING_AT_HEAD | {"hdf5", "csv", "tfrecord", "parquet", "synthetic"}
PYPI: Final = Release(name="dlio-benchmark 2.0.0 (PyPI)")
HEAD: Final = Release(name="argonne-lcf/dlio_benchmark 2.x", putting=_PUTTING_AT_HEAD)
FORK: Final = Release(name="mlcommons/DLIO_local_changes 3.x", putting=_PUTTING_IN_FORK)

#: What is wrapped or called, and the arguments it must have.
_ARGUMENTS: Final[Mapping[str, tuple[str, ...]]] = {
    "get_storage": ("storage_type", "namespace", "framework"),
    "get_generator": ("type",),
}


def identify(version: str, options: type[Any]) -> Release:
    """Tell a release by its version and by the names of its options.

    Args:
        version: of the installed distribution.
        options: DLIO's class ``ConfigArguments``.

    Raises:
        UnsupportedError: it is none that is known.
    """
    major = version.partition(".")[0]
    counts_in_bytes = hasattr(options, "record_length_bytes")
    if version == "2.0.0" and hasattr(options, "record_length") and not counts_in_bytes:
        return PYPI
    if major == "2" and counts_in_bytes:
        return HEAD
    if major == "3" and hasattr(options, "storage_library"):
        return FORK
    raise UnsupportedError(
        f"kvio does not know DLIO {version} with such options; it knows {PYPI.name}, {HEAD.name} "
        f"and {FORK.name}"
    )


def check_signature(name: str, function: Callable[..., Any]) -> None:
    """Refuse to wrap what is not what it was when this was written.

    Raises:
        UnsupportedError: its arguments are others.
    """
    found = tuple(inspect.signature(function).parameters)
    if found != _ARGUMENTS[name]:
        raise UnsupportedError(
            f"DLIO's {name} takes ({', '.join(found)}), not ({', '.join(_ARGUMENTS[name])}): "
            "kvio does not know this DLIO"
        )
