"""Parse and check the settings of a run; convert DLIO's paths to keys."""

from __future__ import annotations

import dataclasses
import json
import os
import posixpath
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self
from urllib.parse import quote

from kvio.errors import ConfigError, InvalidKeyError, KvioError
from kvio.types import MiB, check_key


class PlanError(KvioError):
    """The run did not write or read the blocks that its workload requires."""


# --------------------------------------------------------------------------------------------------
# Convert DLIO's paths to keys: a key is the path without a leading ``/``.


def key_of(name: object) -> str:
    """Return the key of a path; ``/data/a``, ``data/a`` and ``./data/a`` have the same key.

    Raises:
        InvalidKeyError: the path has ``..`` or a character that is invalid in keys.
    """
    text = str(name)
    if ".." in text.split("/"):
        raise InvalidKeyError(f"DLIO's folder {text!r} goes up with '..': kvio keys cannot")
    key = posixpath.normpath(f"/{text}").lstrip("/")
    check_key(key)
    return key


def path_of(name: object) -> str:
    """Return the absolute path of a key, which DLIO can make absolute again without a change."""
    return f"/{key_of(name)}"


# --------------------------------------------------------------------------------------------------
# Parse and check the settings of a run.


#: The environment variable for all ranks and workers: a store's URL, or JSON.
VARIABLE: Final = "KVIO_DLIO"

_SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108  # a tmpfs: staged samples need no disk


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a run.

    Attributes:
        data: the URL of the store of samples.
        checkpoint: the URL of the store of checkpoints; None: the store of samples.
        options: more options of the store of samples, as in its URL.
        file_mode: permissions of the files of samples and checkpoints, as octal digits such as
            ``0640``; None: those that the umask leaves, as for files of other programs.
        dir_mode: permissions of their directories, in the same way.
        group: the name or number of the group of both; None: the system's choice.
        staging_dir: directory for generators that write files, which are copied from it; None: a
            directory below the root, from which files are moved, or shared memory for other stores.
        write_threads: number of generated files that a rank stores at a time; None: two, or one if
            storing a file is fast.
        keep_bytes: bytes of blocks that kvio's loader keeps for an epoch in a rank, where shuffled
            samples of one block come apart.
        decode: decode samples to arrays; None: if DLIO's own reader of the format does.
    """

    data: str
    checkpoint: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    file_mode: str | int | None = None
    dir_mode: str | int | None = None
    group: str | int | None = None
    staging_dir: str | None = None
    write_threads: int | None = None
    keep_bytes: int = 256 * MiB
    decode: bool | None = None

    def __post_init__(self) -> None:
        for name in ("data", "checkpoint", "staging_dir"):
            value = getattr(self, name)
            if not isinstance(value, str) and (name == "data" or value is not None):
                raise ConfigError(f"DLIO on kvio: {name!r} must be text, not {_kind(value)}")
        if not isinstance(self.options, Mapping):
            raise ConfigError(
                f"DLIO on kvio: 'options' must be a mapping, not {_kind(self.options)}"
            )
        for name in ("file_mode", "dir_mode", "group"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, str | int | None):
                raise ConfigError(f"DLIO on kvio: {name!r} must be text, not {_kind(value)}")
        threads = 1 if self.write_threads is None else self.write_threads
        if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
            raise ConfigError(f"DLIO on kvio: 'write_threads' must be at least 1, not {threads!r}")
        if isinstance(self.keep_bytes, bool) or not isinstance(self.keep_bytes, int):
            raise ConfigError(
                f"DLIO on kvio: 'keep_bytes' must be a number, not {_kind(self.keep_bytes)}"
            )
        if not isinstance(self.decode, bool | None):
            raise ConfigError(f"DLIO on kvio: 'decode' must be true or false, not {self.decode!r}")

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Parse the result of `to_text`, or a URL.

        Raises:
            ConfigError: *text* is neither.
        """
        if not text.lstrip().startswith("{"):
            return cls(data=text.strip())
        try:
            given = json.loads(text)
        except ValueError as exc:
            raise ConfigError(f"{VARIABLE} is neither a URL nor JSON: {exc}") from None
        return cls.from_mapping(given)

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> Self:
        """Return settings from attributes by name.

        Raises:
            ConfigError: a name is unknown, or ``data`` is missing.
        """
        known = [one.name for one in dataclasses.fields(cls)]
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise ConfigError(
                f"DLIO on kvio: unknown settings {', '.join(unknown)}; known: {', '.join(known)}"
            )
        if "data" not in given:
            raise ConfigError("DLIO on kvio: 'data', the URL of a store, is needed")
        return cls(**given)

    def to_text(self) -> str:
        """Return the settings as JSON."""
        return json.dumps({**dataclasses.asdict(self), "options": dict(self.options)})

    def staging_parent(self) -> str:
        """Return the parent for a staging directory."""
        if self.staging_dir is not None:
            return self.staging_dir
        return _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else tempfile.gettempdir()


def _kind(value: object) -> str:
    """Return the name of the type, because the value may be a secret."""
    return type(value).__name__


def store_url(backend: str, root: str) -> str:
    """Return the URL of a store from a backend's name and a directory or ``bucket/prefix``.

    The backend ``memory`` has neither.
    """
    if "://" in root:
        raise ConfigError("kvio.root must be a directory or a bucket, not a URL")
    if backend == "memory":
        return "memory://"
    if backend.partition("+")[0] == "s3":
        return f"{backend}://{quote(root)}"
    return f"{backend}://{quote(os.path.abspath(root))}"


def configured() -> Settings | None:
    """Return the settings in this process's environment, or None."""
    text = os.environ.get(VARIABLE)
    return Settings.from_text(text) if text else None
