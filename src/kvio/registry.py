"""Find backends by name, among the entry points ``kvio.backends`` of installed packages.

kvio's own backends are registered in the same way. Entry points are read when the first backend
is loaded, and only the module of that backend is imported.
"""

from __future__ import annotations

import difflib
import os
from typing import TYPE_CHECKING, Final

from kvio.abc import Backend
from kvio.errors import ConfigError, MissingDependencyError, UnknownBackendError
from kvio.filesystem.descriptors import retrying

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint, EntryPoints

GROUP: Final = "kvio.backends"
#: Names for the first of several backends whose library is installed and usable in this process,
#: fastest first (docs/experiments/s3.md).
CHOICES: Final = {"s3": ("s3+obstore", "s3+s3dlio", "s3+minio", "s3+torch", "s3+boto3")}


def backend_names() -> list[str]:
    """List the names of all registered backends, sorted."""
    return sorted({*CHOICES, *(entry.name for entry in _entry_points())})


def load_backend(name: str) -> type[Backend]:
    """Import the backend registered under a name.

    Raises:
        UnknownBackendError: no installed package registers it; the message suggests a name.
        MissingDependencyError: its module needs a package that is not installed.
        ConfigError: two packages register it, or it is not a backend.
    """
    if name in CHOICES:
        return _load_best(name)
    found = list(_entry_points().select(name=name))
    if not found:
        raise UnknownBackendError(_unknown(name))
    targets = {entry.value for entry in found}
    if len(targets) > 1:
        raise ConfigError(f"backend {name!r} is registered twice: {', '.join(sorted(targets))}")
    backend = _import(found[0])
    if not (isinstance(backend, type) and issubclass(backend, Backend)):
        raise ConfigError(f"backend {name!r} ({found[0].value}) is not a kvio.abc.Backend")
    return backend


def _load_best(name: str) -> type[Backend]:
    found: list[type[Backend]] = []
    for choice in CHOICES[name]:
        try:
            backend = load_backend(choice)
        except (MissingDependencyError, UnknownBackendError):
            continue
        if backend.usable_here():
            return backend
        found.append(backend)
    if found:
        return found[0]  # says why it cannot be used
    extra = CHOICES[name][0].replace("+", "-")
    raise MissingDependencyError(
        f"backend {name!r} needs one of {', '.join(CHOICES[name])}: pip install 'kvio[{extra}]'"
    )


def _entry_points() -> EntryPoints:
    # Imported late: a quarter of the time `import kvio` would take.
    from importlib.metadata import entry_points

    return retrying(lambda: entry_points(group=GROUP))


def _import(entry: EntryPoint) -> object:
    own = entry.module.partition(".")[0]
    try:
        return entry.load()
    except ModuleNotFoundError as exc:
        missing = (exc.name or "").partition(".")[0]
        if not missing or missing == own:
            raise
        raise MissingDependencyError(_missing(entry, missing), name=exc.name) from exc


def _missing(entry: EntryPoint, package: str) -> str:
    distribution = entry.dist.name if entry.dist is not None else "its distribution"
    extra = entry.name.replace("+", "-")
    extras = entry.dist.metadata.get_all("Provides-Extra") or [] if entry.dist is not None else []
    hint = f"pip install '{distribution}[{extra}]'" if extra in extras else f"install {package}"
    return f"backend {entry.name!r} needs the package {package!r}: {hint}"


def _unknown(name: str) -> str:
    if os.path.isdir(name):
        return f"no backend is named {name!r:.80}; the directory of that name is './{name}'"
    names = backend_names()
    near = difflib.get_close_matches(name, names, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"installed: {', '.join(names) or 'none'}"
    return f"no backend is named {name!r:.80}; {hint}"
