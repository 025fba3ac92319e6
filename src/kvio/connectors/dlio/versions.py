"""Identify the installed DLIO, and refuse unknown versions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvio.errors import UnsupportedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """A version of DLIO that this connector supports.

    Attributes:
        name: the name in its README.
        put_data_formats: formats whose generators call put_data; the others write files.
    """

    name: str
    put_data_formats: frozenset[str] = frozenset()


_HEAD_FORMATS: Final = frozenset({"npz", "npy", "jpeg", "png"})
_FORK_FORMATS: Final = _HEAD_FORMATS | {"hdf5", "csv", "tfrecord", "parquet", "synthetic"}
PYPI: Final = Release(name="dlio-benchmark 2.0.0 (PyPI)")
HEAD: Final = Release(name="argonne-lcf/dlio_benchmark 2.x", put_data_formats=_HEAD_FORMATS)
FORK: Final = Release(name="mlcommons/DLIO_local_changes 3.x", put_data_formats=_FORK_FORMATS)

#: The wrapped functions of DLIO, and the arguments they must have.
_ARGUMENTS: Final[Mapping[str, tuple[str, ...]]] = {
    "get_storage": ("storage_type", "namespace", "framework"),
    "get_generator": ("type",),
}


def identify(version: str, options: type[Any]) -> Release:
    """Return the release with a version and the names of its options.

    Args:
        version: the version of the installed distribution.
        options: DLIO's class ``ConfigArguments``.

    Raises:
        UnsupportedError: the release is unknown.
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
    """Refuse to wrap a function whose arguments differ from the expected ones.

    Raises:
        UnsupportedError: the arguments differ.
    """
    found = tuple(inspect.signature(function).parameters)
    if found != _ARGUMENTS[name]:
        raise UnsupportedError(
            f"DLIO's {name} takes ({', '.join(found)}), not ({', '.join(_ARGUMENTS[name])}): "
            "kvio does not know this DLIO"
        )
