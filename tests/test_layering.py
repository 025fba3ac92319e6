"""Who may import whom: dependencies go one way, and optional libraries wait until they are used."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import kvio

SOURCE = Path(kvio.__file__).parent

#: The public names, as a user imports them: ``kvio`` itself, and its types and errors.
PUBLIC = {"kvio", "types", "errors"}
_MEDIA = {"backends.posix", "medium"}
_BACKEND = {
    *("abc", "errors", "types", "url", "format", "buffers", "medium", "policies", "_native", "s3"),
    *("descriptors", "permissions", "system_memory"),
}

#: What each module or package may import of kvio, besides itself. Nothing may import what is not
#: named here; a new module must find its place.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "types": {"errors"},
    "descriptors": {"_native"},
    "_native": set(),
    "url": {"types", "errors"},
    "format": {"types", "errors"},
    "policies": {"types", "errors"},
    "abc": {"types", "errors", "url"},
    "filesystem": set(),
    "system_memory": {"filesystem"},
    "medium": {"_native", "filesystem"},
    "permissions": {"_native", "errors", "medium"},
    "placement": {"_native", "errors", "filesystem", "types"},
    "_dlpack": {"_native", "errors"},
    "buffers": {"_native", "_dlpack", "system_memory", "types", "errors"},
    "s3": {"abc", "buffers", "errors", "exits", "threads", "types", "url", "format", "_native"},
    "backends": _BACKEND,
    "wrappers": {
        *("_native", "abc", "buffers", "errors", "forks", "placement", "reads", "store", "types"),
        *("exits", "threads", "url"),
    },
    "sharedfile": {
        *("_native", "abc", "buffers", "descriptors", "errors", "executor", "exits", "forks"),
        *("medium", "permissions", "placement", "policies", "threads", "types"),
    },
    "registry": {"abc", "descriptors", "errors"},
    "threads": {"errors"},
    "executor": {"exits", "threads", "types", "errors"},
    "calls": {"executor", "placement", "threads", "types", "errors"},
    "forks": set(),
    "exits": {"errors"},
    "counters": {"types", "errors"},
    "reads": {"abc", "buffers", "types", "errors"},
    "damage": {"abc", "buffers", "types", "errors"},
    "quarantine": {"_native", "abc", "errors", "format", "types"},
    "batches": {"abc", "buffers", "calls", "damage", "errors", "threads", "types"},
    "streams": {"_native", "abc", "buffers", "reads", "types", "errors"},
    "store": {
        *(
            "abc",
            "batches",
            "buffers",
            "calls",
            "counters",
            "damage",
            "errors",
            "exits",
            "forks",
            "format",
            "policies",
        ),
        *("quarantine", "reads", "registry", "streams", "types", "url"),
    },
    "aio": {"batches", "store", "calls", "buffers", "threads", "types", "errors"},
    "opening": {"store", "calls", "placement", "types", "errors", "url"},
    "kvio": {
        "aio",
        "buffers",
        "errors",
        "opening",
        "registry",
        "sharedfile",
        "store",
        "types",
        "wrappers",
    },
    # Above the public API. Tuning and the doctor look at a medium before any store is open on it.
    "tuning": {*PUBLIC, "_native", "buffers", "opening", "policies", "store", "url"} | _MEDIA,
    "doctor": {*PUBLIC, "_native", "opening", "policies", "tuning", "url"} | _MEDIA,
    "cli": {
        *(*PUBLIC, "doctor", "experiments", "placement", "policies", "quarantine", "tuning"),
        "url",
    },
    "__main__": {"cli"},
    "experiments": {*PUBLIC, "placement"},
    "connectors": PUBLIC,
    "testing": {*PUBLIC, "abc", "calls", "store", "url"},
}
#: Single imports beyond the table, each with its reason.
EXCEPTIONS = {
    ("experiments.page_cache", "_native"): "no public call looks at the page cache",
    ("experiments.lanes", "policies"): "a store of one mode is made by a calibration",
    ("experiments.lanes", "tuning"): "and the calibrated one by tuning",
    ("cli.staging", "wrappers"): "a daemon is a program; its clients use kvio.stage",
    ("connectors.dlio.hydra_callback", "url"): "secrets are refused before Hydra writes them down",
    ("connectors.dlio.tfrecord", "_native"): "records have a CRC32C",
    ("experiments.backends", "url"): "sizes on the command line are read as in URLs",
}
#: Libraries beside the standard one, and where alone they may be imported.
LIBRARIES = {
    "cffi": {"_native"},
    "numpy": {"connectors.dlio", "experiments"},
    "typer": {"cli"},
    "rich": {"cli", "experiments"},
    "matplotlib": {"experiments"},
    "pytest": {"testing"},
    "hypothesis": {"testing.stateful"},
    "boto3": {"backends.s3_boto3", "experiments.s3.libraries"},
    "botocore": {"backends.s3_boto3", "experiments.s3.libraries"},
    "minio": {"backends.s3_minio", "experiments.s3.libraries"},
    "urllib3": {"backends.s3_boto3", "backends.s3_minio", "experiments.s3.libraries"},
    "obstore": {"backends.s3_obstore", "experiments.peers", "experiments.s3.libraries"},
    "s3dlio": {"backends.s3_s3dlio", "experiments.s3.libraries"},
    "s3torchconnectorclient": {"backends.s3_torch", "experiments.s3.libraries"},
    "mpi4py": {"experiments.mpi", "sharedfile"},
    "safetensors": {"experiments.peers"},
    "tensorstore": {"experiments.peers"},
    "torch": {
        *("connectors.dlio", "connectors.torch_dcp", "experiments.engines", "sharedfile"),
        "wrappers.staging",
    },
    "tensorflow": {"connectors.dlio.stand_ins"},
    "dlio_benchmark": {"connectors.dlio", "experiments.dlio.plain"},
    "hydra": {"connectors.dlio"},
    "omegaconf": {"connectors.dlio"},
    "PIL": {"connectors.dlio"},
    "h5py": {"connectors.dlio"},
    "pandas": {"connectors.dlio"},
    "lmcache": {"experiments.engines"},
    "nixl": {"experiments.engines"},
}


def modules() -> dict[str, Path]:
    """Map every module of kvio to its file, without the leading ``kvio.``."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        found[name.removesuffix(".__init__").replace("__init__", "kvio")] = path
    return found


MODULES = modules()


def imports_of(path: Path) -> Iterator[str]:
    """Yield the full names of the modules a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            base = node.module or ""
            names = {alias.name: f"{base}.{alias.name}" for alias in node.names}
            below = [full for full in names.values() if full.removeprefix("kvio.") in MODULES]
            yield from below
            if len(below) < len(names):
                yield base


def own_imports(name: str) -> set[str]:
    """Give the modules of kvio that a module imports, without the leading ``kvio.``."""
    found = {
        target.removeprefix("kvio.")
        for target in imports_of(MODULES[name])
        if target.partition(".")[0] == "kvio"
    }
    return {target for target in found if target != name}


def within(name: str, places: set[str]) -> bool:
    """Tell whether a module is one of the places or lies below one."""
    return any(name == place or name.startswith(f"{place}.") for place in places)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_module_imports_what_its_place_allows(name: str) -> None:
    """The import table of the design holds for every module."""
    place = name.partition(".")[0]

    assert place in MAY_IMPORT, f"{name}: give the new module a line in MAY_IMPORT"
    allowed = MAY_IMPORT[place] | {place}
    beyond = {
        target
        for target in own_imports(name)
        if not within(target, allowed) and (name, target.partition(".")[0]) not in EXCEPTIONS
    }
    assert beyond == set(), f"{name} must not import {sorted(beyond)}"


def test_no_backend_imports_another() -> None:
    """Backends share functions below them, never each other."""
    for name in MODULES:
        if name.startswith("backends."):
            own = name.split(".")[1]
            others = {t for t in own_imports(name) if t.startswith("backends.")}
            assert {target.split(".")[1] for target in others} <= {own}, name


def test_every_exception_is_still_needed() -> None:
    """An exception nobody uses any more is removed from the table."""
    for name, target in EXCEPTIONS:
        assert name in MODULES
        assert any(within(found, {target}) for found in own_imports(name)), (name, target)


def test_imports_have_no_cycle() -> None:
    """Modules can be put in an order in which each imports only earlier ones.

    A package's ``__init__`` stands for what it re-exports, so inside a package importing a
    sibling through it does not count.
    """
    graph = {
        name: {
            target
            for target in own_imports(name)
            if target in MODULES and not name.startswith(f"{target}.") and target != "kvio"
        }
        for name in MODULES
    }
    order = list(TopologicalSorter(graph).static_order())

    assert set(MODULES) <= set(order) | {"kvio"}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_module_imports_libraries_only_in_their_place(name: str) -> None:
    """Only `_native` knows cffi; every optional library is imported in its place alone."""
    for target in imports_of(MODULES[name]):
        library = target.partition(".")[0]
        if library == "kvio" or library in sys.stdlib_module_names:
            continue
        assert library in LIBRARIES, f"{name} imports {library}, which has no line in LIBRARIES"
        assert within(name, LIBRARIES[library]), f"{name} must not import {library}"


_OPTIONAL = (
    *("numpy", "torch", "typer", "rich", "matplotlib", "boto3", "minio", "obstore", "s3dlio"),
    *("s3torchconnector", "pytest", "hypothesis", "ml_dtypes", "asyncio.unix_events"),
)


def _loaded_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_importing_kvio_loads_no_optional_library() -> None:
    """``import kvio`` loads neither numpy nor any extra's library, even where installed."""
    loaded = _loaded_by("import kvio")

    assert loaded.isdisjoint(set(_OPTIONAL) - {"asyncio.unix_events"})
    assert not any(name.startswith("kvio.backends") for name in loaded)


def test_opening_a_store_loads_its_backend_alone() -> None:
    """Opening memory loads no POSIX backend, and neither loads numpy."""
    loaded = _loaded_by("import kvio\nkvio.open_store('memory').write_block('a', b'b')")

    assert "kvio.backends.memory" in loaded
    assert "kvio.backends.posix" not in loaded
    assert "numpy" not in loaded


def test_staging_is_loaded_when_it_is_asked_for() -> None:
    """``import kvio`` does not pay for it, and staging in host memory loads no torch."""
    assert not any(name.startswith("kvio.wrappers") for name in _loaded_by("import kvio"))
    loaded = _loaded_by("import kvio\nkvio.stage(kvio.open_store('memory'), '1MiB').close()")

    assert "kvio.wrappers.staging.tier" in loaded
    assert loaded.isdisjoint({"torch", "numpy"})


def test_the_pytest_plugin_loads_neither_hypothesis_nor_numpy() -> None:
    """Whoever has kvio installed pays little for its plugin in every run of pytest."""
    loaded = _loaded_by("import kvio.testing.plugin")

    assert loaded.isdisjoint({"numpy", "hypothesis", "torch", "kvio.testing.suite"})


def test_importing_kvio_reads_no_environment_and_opens_nothing() -> None:
    """``import kvio`` looks at no variable of the environment and opens no file but modules."""
    code = """
import os, sys
seen = []
class Watched(dict):
    def __getitem__(self, name):
        seen.append(name)
        return super().__getitem__(name)
    get = __contains__ = __getitem__
import cffi, concurrent.futures, asyncio, importlib.metadata, ctypes, difflib, hashlib, json
import urllib.parse, dataclasses, heapq
os.environ._data = Watched(os.environ._data)
def hook(event, arguments):
    if event == "open" and str(arguments[0]).rpartition(".")[2] not in ("py", "pyc", "so"):
        seen.append(arguments[0])
sys.addaudithook(hook)
import kvio
print(seen)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (run.stdout.strip(), run.returncode) == ("[]", 0), run.stderr
