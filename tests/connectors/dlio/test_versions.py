"""Which DLIO this is: the releases as they were read, and no other."""

from __future__ import annotations

from typing import Any

import pytest

import kvio
from kvio.connectors.dlio.versions import FORK, HEAD, PYPI, Release, check_signature, identify


class PypiOptions:
    """The options of dlio-benchmark 2.0.0 that identify it."""

    record_length = 0


class HeadOptions(PypiOptions):
    """Those of argonne-lcf/dlio_benchmark e1919d7, whose setup.py says 2.0.0 still."""

    record_length_bytes = 0
    storage_options: Any = None


class ForkOptions(HeadOptions):
    """Those of mlcommons/DLIO_local_changes f6796ed."""

    storage_library: Any = None


@pytest.mark.parametrize(
    ("version", "options", "release"),
    [
        ("2.0.0", PypiOptions, PYPI),
        ("2.0.0", HeadOptions, HEAD),
        ("2.0.1", HeadOptions, HEAD),
        ("3.0.2", ForkOptions, FORK),
    ],
)
def test_a_known_release_is_reported(version: str, options: type[Any], release: Release) -> None:
    """By its version and its options: two of them say 2.0.0."""
    assert identify(version, options) is release


@pytest.mark.parametrize(
    ("version", "options"),
    [("1.1.0", PypiOptions), ("2.1.0", PypiOptions), ("4.0", ForkOptions), ("3.0.2", HeadOptions)],
)
def test_another_release_is_refused(version: str, options: type[Any]) -> None:
    """With its version, and those that are known."""
    with pytest.raises(kvio.UnsupportedError, match=rf"DLIO {version}.*PyPI"):
        identify(version, options)


def test_generators_that_put_are_reported_by_release() -> None:
    """In 2.0.0 all write files; at the heads most hand over bytes."""
    assert PYPI.put_data_formats == frozenset()
    assert {"npz", "npy", "jpeg", "png"} == HEAD.put_data_formats
    assert "indexed_binary" not in FORK.put_data_formats
    assert "hdf5" in FORK.put_data_formats


def test_a_factory_with_other_arguments_is_not_wrapped() -> None:
    """What changed under the same version is refused by what it takes."""

    def get_storage(storage_type: object, namespace: object) -> None:
        del storage_type, namespace

    with pytest.raises(kvio.UnsupportedError, match=r"get_storage takes \(storage_type, namesp"):
        check_signature("get_storage", get_storage)
