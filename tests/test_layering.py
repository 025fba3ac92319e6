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
#: What nothing lies below: the vocabulary, and the C core.
_GROUND = {"_native", "abc", "errors", "format", "types", "url"}

#: What each room (or module) may import of kvio, besides itself, from the lowest floor up. Nothing
#: may import what is not named here; a new room must find its floor.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "_native": set(),
    "types": {"errors"},
    "url": {"types", "errors"},
    "format": {"types", "errors"},
    "abc": {"types", "errors", "url"},
    "filesystem": {"_native", "errors", "types"},
    "registry": {"abc", "errors", "filesystem"},
    "placement": {"_native", "errors", "filesystem", "types"},
    "core": {*_GROUND, "filesystem", "placement", "registry"},
    "backends": {*_GROUND, "core", "filesystem"},
    "staging": {*_GROUND, "core", "placement"},
    "sharedfile": {*_GROUND, "core", "filesystem", "placement"},
    "kvio": {"abc", "core", "errors", "registry", "sharedfile", "staging", "types"},
    # Above the public interface: programs that try the backends, and what is built on stores.
    "diagnostics": {*PUBLIC, "_native", "backends.posix", "core", "filesystem", "url"},
    "connectors": PUBLIC,
    "testing": {*PUBLIC, "abc", "core", "url"},
    "cli": {*PUBLIC, "core", "diagnostics", "filesystem", "placement", "url"},
    "__main__": {"cli"},
}
#: Single imports beyond the table, each with its reason.
EXCEPTIONS = {
    ("backends.s3.backend", "registry"): "another library does what the store's own cannot",
    ("cli.staging", "staging"): "a daemon is a program; its clients use kvio.stage",
    ("connectors.dlio.hydra_callback", "url"): "secrets are refused before Hydra writes them down",
    ("connectors.dlio.decoding", "_native"): "records have a CRC32C",
    ("connectors.dlio.blocks", "filesystem"): "a dataset has the permissions that the umask leaves",
    ("connectors.dlio.blocks", "url"): "options in a URL come before those of the umask",
    ("connectors.safetensors", "abc"): "it returns the receipt of any store",
}
#: Libraries beside the standard one, and where alone they may be imported.
LIBRARIES = {
    "cffi": {"_native"},
    "typing_extensions": {"core.async_store"},  # for type checkers alone, which have it
    "numpy": {"connectors.dlio", "connectors.mlperf_kv"},
    "typer": {"cli"},
    "rich": {"cli"},
    "pytest": {"testing"},
    "hypothesis": {"testing.stateful"},
    "boto3": {"backends.s3.boto3"},
    "botocore": {"backends.s3.boto3", "backends.s3.profiles"},
    "minio": {"backends.s3.minio"},
    "urllib3": {"backends.s3.boto3", "backends.s3.minio"},
    "obstore": {"backends.s3.obstore", "backends.s3.profiles"},  # there for its types
    "s3dlio": {"backends.s3.s3dlio"},
    "s3torchconnectorclient": {"backends.s3.torch"},
    "mpi4py": {"sharedfile"},
    "torch": {
        *("connectors.dlio", "connectors.lightning", "connectors.safetensors"),
        *("connectors.torch_dcp", "sharedfile", "staging"),
    },
    "tensorflow": {"connectors.dlio.stand_ins"},
    "dlio_benchmark": {"connectors.dlio"},
    "hydra": {"connectors.dlio"},
    "omegaconf": {"connectors.dlio"},
    "PIL": {"connectors.dlio"},
    "h5py": {"connectors.dlio"},
    "pandas": {"connectors.dlio"},
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
    """Return the modules of kvio that a module imports, without the leading ``kvio.``."""
    found = {
        target.removeprefix("kvio.")
        for target in imports_of(MODULES[name])
        if target.partition(".")[0] == "kvio"
    }
    return {target for target in found if target != name}


def within(name: str, places: set[str]) -> bool:
    """Return whether a module is one of the places or lies below one."""
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
    libraries = {"boto3", "minio", "obstore", "s3dlio", "torch"}
    for library in libraries:
        name = f"backends.s3.{library}"
        others = {f"backends.s3.{other}" for other in libraries - {library}}
        assert own_imports(name).isdisjoint(others), name


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
    assert not any(name.startswith("kvio.staging") for name in _loaded_by("import kvio"))
    loaded = _loaded_by("import kvio\nkvio.stage(kvio.open_store('memory'), '1MiB').close()")

    assert "kvio.staging.tier" in loaded
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
