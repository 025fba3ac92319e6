"""Store URLs, and options turned from text into typed dataclasses."""

from __future__ import annotations

import difflib
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import (
    Any,
    Final,
    Literal,
    Never,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
)
from urllib.parse import parse_qsl, unquote, urlsplit

from kvio.errors import ConfigError, UnknownBackendError


class Secret:
    """A credential: never shown, never pickled."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """Return the value, for code that sends it or signs with it."""
        return self._value

    def __repr__(self) -> str:
        return "Secret(***)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._value == self._value

    def __hash__(self) -> int:
        return hash(self._value)

    def __reduce__(self) -> Never:
        raise TypeError("a secret is not pickled")


OptionValue: TypeAlias = str | int | float | bool | Secret | None
T = TypeVar("T")


class PermissionBits(int):
    """Permission bits of a file or directory; text, as in a URL, is octal: ``0640``."""


#: Options that are credentials, whatever backend they are for.
SECRET_OPTIONS: Final = frozenset({"access_key", "secret_key", "session_token"})

_UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6}
_UNITS |= {"gb": 10**9, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "b": 1}
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True, slots=True)
class StoreURL:
    """A parsed store URL.

    Attributes:
        scheme: the backend's registered name.
        host: the part between ``//`` and the path: a bucket, or empty.
        path: the path, unquoted.
        options: those of the query, and those passed to ``open_store``.
    """

    scheme: str
    host: str = ""
    path: str = ""
    options: Mapping[str, OptionValue] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """The URL without its options, for messages."""
        return f"{self.scheme}://{self.host}{self.path or self.options.get('root', '')}"

    def without_secrets(self) -> StoreURL:
        """Return the same URL without credentials."""
        kept = {k: v for k, v in self.options.items() if not isinstance(v, Secret)}
        return StoreURL(self.scheme, self.host, self.path, kept)


def parse_url(text: str) -> StoreURL:
    """Read ``scheme://host/path?option=value`` or a bare scheme.

    Raises:
        ConfigError: the text is not such a URL, or names an option twice.
    """
    scheme, separator, rest = text.partition("://")
    if not scheme or not scheme.replace("+", "").replace("-", "").isalnum():
        raise ConfigError(
            f"not a store URL: {_shown(text)} (expected backend://path, for example "
            "'hybrid:///mnt/kv', or a path with a slash)"
        )
    if not separator:
        return StoreURL(scheme)
    if not text.isprintable():
        raise ConfigError(f"control characters in a store URL: write %0A, … in {_shown(text)}")
    try:
        parts = urlsplit(f"//{rest}")
    except ValueError as exc:
        reason = "" if "@" in text else f" ({exc})"
        raise ConfigError(f"not a store URL: {_shown(text)}{reason}") from None
    if "@" in parts.netloc:
        raise ConfigError("a store URL must not hold credentials")
    if parts.fragment:
        raise ConfigError(f"a store URL has no fragment: write '#' as %23 in {_shown(text)}")
    options: dict[str, OptionValue] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name in options:
            raise ConfigError(f"option {name!r} is given twice")
        if name in SECRET_OPTIONS:
            raise ConfigError(f"a store URL must not hold credentials: {name} goes into options=")
        options[name] = value
    return StoreURL(scheme, parts.netloc, unquote(parts.path), options)


def locate(where: str | os.PathLike[str]) -> StoreURL:
    """Parse the name of a store: a URL, a backend's name, or the path of a directory, for hybrid.

    A path is an `os.PathLike`, or text with a slash that is not a URL. It is used as it is
    written, with ``%``, ``?``, ``#`` and ``~``, relative to the working directory.

    Raises:
        ConfigError: it is none of these, or a malformed URL.
        UnknownBackendError: it is a URL with the scheme ``file``.
        TypeError: it is neither text nor a path as text.
    """
    if isinstance(where, str) and ("://" in where or "/" not in where):
        parsed = parse_url(where)
        if parsed.scheme == "file":
            raise UnknownBackendError(
                f"no backend is named 'file': write hybrid://{parsed.path}, or the path alone"
            )
        return parsed
    if isinstance(where, str) and where.partition("/")[0].endswith(":"):
        raise ConfigError(f"not a store URL: {_shown(where)} (two slashes follow the colon)")
    if isinstance(where, str) and any(f"{name}=" in where for name in SECRET_OPTIONS):
        raise ConfigError("a path must not hold credentials: they go into options=")
    return StoreURL("hybrid", "", absolute(where))


def absolute(path: str | os.PathLike[str]) -> str:
    """Return the absolute path.

    Raises:
        ConfigError: it is relative, and the working directory was removed.
        TypeError: it is not a path as text.
    """
    text: object = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"a store's path must be text, not {type(text).__name__}: {text!r:.80}")
    try:
        return os.path.abspath(text)
    except FileNotFoundError:
        raise ConfigError(f"{text!r:.80} is relative to a directory that is gone") from None


def _shown(text: str) -> str:
    """Quote the part of a malformed URL that cannot hold a secret."""
    front, query, _ = text.partition("?")
    return f"{front.rpartition('@')[2]!r:.80}" + ("?..." if query else "")


def hide(name: str, value: OptionValue) -> OptionValue:
    """Wrap an option that is a credential."""
    return Secret(value) if name in SECRET_OPTIONS and isinstance(value, str) else value


def parse_size(text: str | int) -> int:
    """Turn ``"4MiB"``, ``"512"`` or 512 into bytes."""
    if isinstance(text, int):
        return text
    digits = text.strip().rstrip("bBgGiIkKmM ")
    unit = text.strip()[len(digits) :].strip().lower()
    try:
        return int(float(digits) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        raise ConfigError(f"not a size in bytes: {text!r} (for example 4MiB)") from None


def typed_options(kind: type[T], options: Mapping[str, OptionValue]) -> T:
    """Build the options dataclass *kind* from text or values, field by field.

    Raises:
        ConfigError: an option is unknown, missing or of the wrong type.
    """
    hints = typing.get_type_hints(kind)
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]  # any dataclass
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
            raise ConfigError(f"unknown option {name!r}{hint}")
    for name, f in known.items():
        if name not in options and f.default is MISSING and f.default_factory is MISSING:
            raise ConfigError(f"option {name!r} is needed")
    values = {name: _convert(name, value, hints[name]) for name, value in options.items()}
    return kind(**values)


def _convert(name: str, value: OptionValue, hint: Any) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        inner = [arm for arm in get_args(hint) if arm is not type(None)]
        if value is None or value == "none":
            return None
        return value if type(value) in inner else _convert(name, value, inner[0])
    if origin is Literal:
        if value not in get_args(hint):
            choices = ", ".join(map(repr, get_args(hint)))
            raise ConfigError(f"option {name!r} must be one of {choices}, not {value!r}")
        return value
    if hint is bool:
        return _convert_bool(name, value)
    if hint is PermissionBits:
        return _convert_permissions(name, value)
    if hint is int and isinstance(value, int | str) and not isinstance(value, bool):
        return parse_size(value)
    if hint is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        return _convert_float(name, value)
    if hint is str and isinstance(value, str):
        return value
    if hint is Secret and isinstance(value, str | Secret):
        return Secret(value) if isinstance(value, str) else value
    if name in SECRET_OPTIONS:
        raise ConfigError(f"option {name!r} must be text")
    raise ConfigError(f"option {name!r} must be {getattr(hint, '__name__', hint)}, not {value!r}")


def _convert_bool(name: str, value: OptionValue) -> bool:
    text = str(value).lower()
    if text not in _TRUE | _FALSE:
        raise ConfigError(f"option {name!r} must be true or false, not {value!r}")
    return text in _TRUE


def _convert_permissions(name: str, value: OptionValue) -> PermissionBits:
    try:
        if isinstance(value, str):
            return PermissionBits(value, 8)
        if isinstance(value, int) and not isinstance(value, bool):
            return PermissionBits(value)
    except ValueError:
        pass
    raise ConfigError(f"option {name!r} must be permission bits in octal, not {value!r}")


def _convert_float(name: str, value: float | str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ConfigError(f"option {name!r} must be a number, not {value!r}") from None
