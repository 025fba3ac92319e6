"""The public names: complete, documented and typed."""

from __future__ import annotations

import enum
import importlib.metadata
import importlib.resources
import inspect
import types
from collections.abc import Iterator
from typing import Any

import pytest

import kvio
from kvio import abc
from kvio.testing import fakes, suite

#: Names of design section 3 that a store must have.
VERBS = (
    *(
        "write_block",
        "write_file",
        "read_block",
        "read_block_into",
        "stat_block",
        "contains",
        "delete_block",
    ),
    *("list_keys", "write_blocks", "read_blocks_into", "delete_blocks", "count_leading"),
    *("drop_cache", "path_of"),
    *("submit_write", "submit_read_into", "capabilities", "stats", "flush", "close"),
)
#: Verbs that a staging tier has no use for: it queues, its store promises, and a file is not in
#: memory.
STORES_ONLY = ("write_file",)
#: The error tree of design section 4: name, and what it is besides.
ERRORS: dict[str, tuple[type, ...]] = {
    "ConfigError": (kvio.KvioError, ValueError),
    "UnknownBackendError": (kvio.KvioError, LookupError),
    "MissingDependencyError": (kvio.KvioError, ImportError),
    "UnsupportedError": (kvio.KvioError,),
    "StoreClosedError": (kvio.KvioError,),
    "RankFailedError": (kvio.KvioError,),
    "BlockError": (kvio.KvioError,),
    "InvalidKeyError": (kvio.BlockError, ValueError),
    "BlockNotFoundError": (kvio.BlockError, LookupError),
    "BlockExistsError": (kvio.BlockError,),
    "BlockSizeError": (kvio.BlockError, ValueError),
    "CorruptBlockError": (kvio.BlockError,),
    "StorageError": (kvio.KvioError, OSError),
    "StorageFullError": (kvio.StorageError,),
    "AccessDeniedError": (kvio.StorageError,),
    "TransientStorageError": (kvio.StorageError,),
    "OutOfMemoryError": (kvio.TransientStorageError, MemoryError),
    "RootMovedError": (kvio.StorageError,),
    "StorageTimeoutError": (kvio.StorageError,),
    "TierNotDrainedError": (kvio.StorageError,),
}


def load_all() -> None:
    """Import what waits until it is asked for."""
    for name in kvio.__all__:
        getattr(kvio, name)


def public_names() -> set[str]:
    """Return the names of kvio that are meant for users."""
    load_all()
    return {
        name
        for name, value in vars(kvio).items()
        if not name.startswith("_")
        and not isinstance(value, types.ModuleType)
        and name not in ("annotations", "TYPE_CHECKING")
    }


def documented() -> Iterator[Any]:
    """Yield a test parameter for every public class, function and method."""
    load_all()
    for home in (kvio, abc, fakes, suite):
        for name, value in vars(home).items():
            if name.startswith("_") or not (inspect.isclass(value) or inspect.isfunction(value)):
                continue
            if not value.__module__.startswith("kvio"):
                continue
            yield pytest.param(value, id=f"{home.__name__}.{name}")
            if inspect.isclass(value):
                yield from _members(value, f"{home.__name__}.{name}")


def _members(kind: type, where: str) -> Iterator[Any]:
    for name, member in vars(kind).items():
        function = member.fget if isinstance(member, property) else member
        function = getattr(function, "__func__", function)
        generated = getattr(function, "__qualname__", "") != f"{kind.__qualname__}.{name}"
        if name.startswith("_") or not inspect.isfunction(function) or generated:
            continue
        yield pytest.param(function, id=f"{where}.{name}")


def _overrides(function: Any) -> bool:
    owner, _, name = function.__qualname__.rpartition(".")
    kind = getattr(fakes, owner, None)
    return inspect.isclass(kind) and issubclass(kind, abc.Backend) and hasattr(abc.Backend, name)


def test_all_is_the_namespace() -> None:
    """Everything public is in ``__all__``, once, and everything in it exists."""
    assert sorted(kvio.__all__) == sorted(set(kvio.__all__))
    assert set(kvio.__all__) == public_names()


@pytest.mark.parametrize("thing", list(documented()))
def test_public_names_have_a_docstring(thing: Any) -> None:
    """The first line of every public docstring is one sentence; overrides inherit theirs."""
    if _overrides(thing) and not thing.__doc__:
        thing = getattr(abc.Backend, thing.__name__)
    doc = inspect.getdoc(thing)

    assert doc
    assert doc.splitlines()[0].rstrip().endswith((".", "?", ":")), doc.splitlines()[0]


@pytest.mark.parametrize("thing", list(documented()))
def test_public_names_are_annotated(thing: Any) -> None:
    """Every parameter and return value of a public function has a type."""
    if inspect.isclass(thing):
        if issubclass(thing, BaseException | enum.Enum) or "__init__" not in vars(thing):
            return
        if getattr(thing, "_is_protocol", False):  # it is never made
            return
        thing = thing.__init__
    signature = inspect.signature(thing)
    untyped = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.annotation is parameter.empty and name not in ("self", "cls")
    ]

    assert untyped == []
    assert signature.return_annotation is not signature.empty


def test_parameters_after_the_second_are_keyword_only() -> None:
    """No call of a store can be misread: key and data, then names."""
    for kind in (kvio.Store, kvio.StagingTier):
        for name, member in inspect.getmembers(kind, inspect.isfunction):
            if name.startswith("_"):
                continue
            parameters = list(inspect.signature(member).parameters.values())[3:]
            assert all(p.kind is p.KEYWORD_ONLY for p in parameters), (kind, name)


@pytest.mark.parametrize("name", VERBS)
def test_stores_have_the_verbs_of_the_design(name: str) -> None:
    """Every name of the design is there, in `Store` and, but for futures, in `AsyncStore`."""
    assert hasattr(kvio.Store, name)
    assert hasattr(kvio.AsyncStore, name) or name.startswith("submit_")


@pytest.mark.parametrize("name", [verb for verb in VERBS if verb not in STORES_ONLY])
def test_staging_tiers_have_the_verbs_of_a_store(name: str) -> None:
    """A tier is read, written and listed as the store behind it."""
    assert hasattr(kvio.StagingTier, name)


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_the_error_tree_is_that_of_the_design(name: str) -> None:
    """Every error is exported, derives as drawn, and is drawn in the module's docstring."""
    kind = getattr(kvio, name)

    assert issubclass(kind, ERRORS[name])
    assert name in (kvio.errors.__doc__ or "")


def test_no_error_is_missing_from_the_tree() -> None:
    """Every error class of kvio is exported and named above."""
    defined = {
        name
        for name, value in vars(kvio.errors).items()
        if inspect.isclass(value) and issubclass(value, kvio.KvioError)
    }

    assert defined == {*ERRORS, "KvioError"}
    assert defined <= set(kvio.__all__)


def test_async_verbs_take_the_parameters_of_the_plain_ones() -> None:
    """`AsyncStore` and `Store` agree on the parameters of every shared verb, and defaults.

    ``if_exists`` is that of the store, which a tier has another of, where it is None.
    """
    for name, verb in inspect.getmembers(kvio.AsyncStore, inspect.isfunction):
        if name.startswith("_"):
            continue
        ours, theirs = inspect.signature(verb), inspect.signature(getattr(kvio.Store, name))
        assert list(ours.parameters) == list(theirs.parameters), name
        for parameter in ours.parameters:
            mine, other = ours.parameters[parameter], theirs.parameters[parameter]
            if (parameter, mine.default) != ("if_exists", None):
                assert mine == other, (name, parameter)


def test_the_forwarding_fake_forwards_every_method() -> None:
    """A method that joins `Backend` later cannot be forgotten in the wrappers of the fakes."""
    wanted = {name for name in vars(abc.Backend) if not name.startswith("_")}

    of_a_class = {"name", "usable_here", "default_io_threads"}
    assert wanted <= set(vars(fakes.ForwardingBackend)) | of_a_class


def test_the_version_is_that_of_the_distribution() -> None:
    """``kvio.__version__`` and the installed metadata agree."""
    assert kvio.__version__ == importlib.metadata.version("kvio")


def test_the_package_is_marked_as_typed() -> None:
    """Type checkers find ``py.typed`` beside the code."""
    files = importlib.resources.files("kvio")

    assert files.joinpath("py.typed").is_file()
