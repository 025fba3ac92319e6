"""Load the KV-cache benchmark from its folder, and give it another storage tier.

Its versions differ in where things stand (one file, or a package behind it) and in what an entry
is (an array, or bytes). All have a script that defines or imports ``MultiTierCache`` and ``main``,
and a cache that makes its storage tier by ``NVMeBackend(base_path=...)``: that name is replaced
where the cache looks it up. Nothing goes by a version.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from kvio.errors import ConfigError, MissingDependencyError

SCRIPT: Final = "kv-cache.py"
_TIER: Final = "NVMeBackend"
_MODULE: Final = "kvio_mlperf_kv_program"


@dataclass(frozen=True, slots=True)
class Program:
    """The benchmark as it was loaded.

    Attributes:
        script: its file.
        module: what the script defines and imports.
        cache: the class that has the tiers.
        names: where the methods of that class look up names.
        main: runs it with the arguments of ``sys.argv``.
    """

    script: Path
    module: ModuleType
    cache: type[Any]
    names: dict[str, Any]
    main: Callable[[], object]

    @property
    def stock(self) -> type[Any]:
        """Its own storage tier."""
        found: type[Any] = self.names[_TIER]
        return found

    @property
    def timing(self) -> Callable[..., Any]:
        """The class of what its tiers return."""
        found: Callable[..., Any] = self.names["StorageBackend"].IOTiming
        return found

    def use(self, make: Callable[..., Any]) -> None:
        """Let it make its storage tier by ``make(base_path=...)``."""
        self.names[_TIER] = make

    def run(self, arguments: list[str]) -> int:
        """Run it as its command does, and return the exit status."""
        sys.argv = [str(self.script), *arguments]
        try:
            self.main()
        except SystemExit as exc:
            if exc.code is None or isinstance(exc.code, int):
                return exc.code or 0
            sys.stderr.write(f"{exc.code}\n")
            return 1
        return 0


def load(folder: Path) -> Program:
    """Load the benchmark from its folder.

    Raises:
        ConfigError: it is not there, or does not make its storage tier as all known versions do.
        MissingDependencyError: a library that it needs is not installed.
    """
    script = folder / SCRIPT
    if not script.is_file():
        raise ConfigError(
            f"{folder}: there is no {SCRIPT}; name the folder kv_cache_benchmark of a clone of "
            "https://github.com/mlcommons/storage"
        )
    module = _execute(script.resolve())
    cache, main = getattr(module, "MultiTierCache", None), getattr(module, "main", None)
    names = getattr(getattr(cache, "__init__", None), "__globals__", {})
    lacks = [
        name
        for name, there in (
            ("MultiTierCache", isinstance(cache, type)),
            ("main", callable(main)),
            (_TIER, isinstance(names.get(_TIER), type)),
            ("StorageBackend.IOTiming", hasattr(names.get("StorageBackend"), "IOTiming")),
        )
        if not there
    ]
    if lacks or not isinstance(cache, type) or not callable(main):
        raise ConfigError(f"{script}: this version has no {', '.join(lacks)}: kvio cannot join it")
    return Program(script, module, cache, names, main)


def _execute(script: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_MODULE, script)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{script} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # dataclasses look their module up
    if str(script.parent) not in sys.path:
        sys.path.insert(0, str(script.parent))
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as exc:
        raise MissingDependencyError(
            f"{script} needs {exc.name}: pip install -r {script.parent / 'requirements.txt'}, "
            "without torch unless this machine has a GPU"
        ) from exc
    return module
