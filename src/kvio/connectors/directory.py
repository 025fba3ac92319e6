"""Save a directory of files in a kvio store, and load it again, each whole or not at all.

```python
save_directory(store, "run-7/checkpoint-500", "out/checkpoint-500")
load_directory(store, "run-7/checkpoint-500", "out/checkpoint-500")
```

For programs that write their checkpoints to paths. Every file is a block under
``NAME/VERSION/000000`` and so on; a list of them in JSON, written last under
``NAME/directory.json``, makes them the directory.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from kvio import BlockStore, aligned_buffer
from kvio.errors import (
    BlockNotFoundError,
    ConfigError,
    CorruptBlockError,
    UnsupportedError,
)
from kvio.types import Level

__all__ = ["load_directory", "remove_directory", "save_directory", "saved_directories"]

_LIST: Final = "directory.json"
_FORMAT: Final = 1


class _File(NamedTuple):
    """A file of the directory: its path in it, its block and its length."""

    path: str
    key: str
    nbytes: int


def save_directory(
    store: BlockStore,
    name: str,
    directory: str | os.PathLike[str],
    *,
    level: str = Level.DURABLE,
) -> None:
    """Store the files of a directory under a name; return when all have reached *level*.

    An earlier save of the name is replaced at once, and removed afterwards; a save that fails or is
    killed does not change it. One process at a time may save a name. The largest file must fit
    into memory. Modes, times and empty directories are not kept.

    Raises:
        UnsupportedError: there is something else than files and directories, such as a symbolic
            link, or the store does not provide the level.
        KvioError: a file could not be stored.
    """
    if level not in (Level.VISIBLE, Level.DURABLE):
        raise ConfigError(f"level must be 'visible' or 'durable', not {level!r}")
    prefix = f"{name}/{secrets.token_hex(8)}"
    files = []
    for number, path in enumerate(_files_below(os.fspath(directory))):
        data = _content(os.path.join(directory, path))
        file = _File(path, f"{prefix}/{number:06d}", len(data))
        _write(store, file.key, data, Level(level))
        files.append(file)
    text = json.dumps({"format": _FORMAT, "files": files}).encode()
    _write(store, f"{name}/{_LIST}", text, Level(level))
    _remove_blocks(store, name, keep={file.key for file in files})


def load_directory(store: BlockStore, name: str, directory: str | os.PathLike[str]) -> None:
    """Make a directory, which must be missing or empty, with the files that were saved.

    Files are verified, and the directory has all of them or none. Modes are 0600 and 0700.

    Raises:
        BlockNotFoundError: no save of this name has completed.
        CorruptBlockError: a file or the list of them is not what was saved.
        OSError: the directory is not empty, or the file system failed.
    """
    files = _saved_files(store, name)
    target = os.path.abspath(directory)
    parent, base = os.path.split(target)
    os.makedirs(parent, exist_ok=True)
    unfinished = os.path.join(parent, f".{base}.{secrets.token_hex(4)}")
    os.mkdir(unfinished, mode=0o700)
    try:
        for file in files:
            data = store.read_block(file.key)
            if len(data) != file.nbytes:
                raise CorruptBlockError(
                    f"file {file.path!r} of {name!r} has {len(data)} bytes, not {file.nbytes}",
                    key=file.key,
                )
            _make_parents(unfinished, file.path)
            with open(os.path.join(unfinished, file.path), "xb", opener=_private) as out:
                out.write(data)
        os.rename(unfinished, target)
    except BaseException:
        shutil.rmtree(unfinished)
        raise


def saved_directories(store: BlockStore, prefix: str = "") -> list[str]:
    """Return the names of the directories that can be loaded and start with *prefix*, sorted."""
    ending = f"/{_LIST}"
    names = [key.removesuffix(ending) for key in store.list_keys(prefix) if key.endswith(ending)]
    return sorted(name for name in names if name.startswith(prefix))  # for "run/" not "run" itself


def remove_directory(store: BlockStore, name: str) -> bool:
    """Remove a directory from the store, and what failed saves of it left; False if none was."""
    found = store.delete_block(f"{name}/{_LIST}")
    _remove_blocks(store, name, keep=set())
    return found


def _files_below(directory: str) -> Iterator[str]:
    """Yield the paths of all files in it, in order."""
    with os.scandir(directory) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from (f"{entry.name}/{path}" for path in _files_below(entry.path))
        elif entry.is_file(follow_symlinks=False):
            yield entry.name
        else:
            raise UnsupportedError(f"{entry.path!r} is neither a file nor a directory")


def _content(path: str) -> memoryview:
    """Read a file into memory that direct I/O writes from without a copy."""
    with open(path, "rb", buffering=0) as file:
        data = aligned_buffer(os.fstat(file.fileno()).st_size)
        at = 0
        while at < len(data):
            got = file.readinto(data[at:])
            if not got:
                raise UnsupportedError(f"{path!r} became shorter while it was read")
            at += got
    return data


def _write(store: BlockStore, key: str, data: Any, level: Level) -> None:
    receipt: Any = store.write_block(key, data, if_exists="replace")
    if hasattr(receipt, "wait"):  # a staging tier's
        receipt = receipt.wait(level)
    if receipt.level < level:
        raise UnsupportedError(
            f"block {key!r} is only {receipt.level}, but must be {level}: open the store with "
            f"durability='durable', or save with level={str(receipt.level)!r}"
        )


def _saved_files(store: BlockStore, name: str) -> list[_File]:
    """Read the list of files; trust no path in it."""
    key = f"{name}/{_LIST}"
    try:
        found = json.loads(bytes(store.read_block(key)))
    except BlockNotFoundError as exc:
        raise BlockNotFoundError(
            f"there is no directory {name!r} in {store!r}: no save has completed (no block "
            f"{key!r})",
            key=key,
        ) from exc
    except (ValueError, RecursionError) as exc:
        raise CorruptBlockError(f"the list of files of {name!r} is not JSON", key=key) from exc
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise UnsupportedError(f"block {key!r} is no list of files that this kvio knows")
    listed = found.get("files")
    entries: list[Any] = listed if isinstance(listed, list) else [listed]
    for entry in entries:
        if not _is_file(name, entry):
            raise CorruptBlockError(f"{entry!r:.200} in {key!r} is no file of {name!r}", key=key)
    return [_File(*entry) for entry in entries]


def _is_file(name: str, entry: object) -> bool:
    """Return whether an entry of the list of a name may be what this module wrote."""
    if not isinstance(entry, list) or len(entry) != len(_File._fields):
        return False
    path, key, nbytes = entry
    return _is_inside(path) and _block_of(name, key) and type(nbytes) is int


def _is_inside(path: object) -> bool:
    """Return whether a path is that of a file below a directory, whatever follows it."""
    return (
        isinstance(path, str)
        and "\0" not in path
        and all(part not in ("", ".", "..") for part in path.split("/"))
    )


def _block_of(name: str, key: object) -> bool:
    """Return whether a key is that of a file in some save of a name."""
    pattern = rf"{re.escape(name)}/[0-9a-f]{{16}}/\d{{6,}}"
    return isinstance(key, str) and re.fullmatch(pattern, key) is not None


def _remove_blocks(store: BlockStore, name: str, *, keep: set[str]) -> None:
    """Remove the files of other saves; names that begin with this one are left alone."""
    for key in [key for key in store.list_keys(f"{name}/") if _block_of(name, key)]:
        if key not in keep:
            store.delete_block(key)


def _make_parents(directory: str, path: str) -> None:
    """Make the directories that a file lies in, private ones; `os.makedirs` makes one so."""
    for part in path.split("/")[:-1]:
        directory = os.path.join(directory, part)
        if not os.path.isdir(directory):
            os.mkdir(directory, mode=0o700)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, stat.S_IRUSR | stat.S_IWUSR)
