"""The command joins a program by what it has: here programs of ours, of a few lines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import kvio
from kvio.connectors.mlperf_kv.__main__ import _opened
from kvio.connectors.mlperf_kv.program import load

#: What a benchmark must have; ``{entries}`` is what it does with its cache.
_CACHE: Final = """
import os, sys
class StorageBackend:
    class IOTiming:
        def __init__(self, total, device, host):
            self.total, self.device, self.host = total, device, host
class NVMeBackend(StorageBackend):
    def __init__(self, base_path=None):
        sys.exit("the program made its own tier")
class MultiTierCache:
    def __init__(self, cache_dir=None):
        self.backends = {"nvme": NVMeBackend(base_path=cache_dir)}
def main():
    cache = MultiTierCache(sys.argv[1] if len(sys.argv) > 1 else None)
    tier = cache.backends["nvme"]
    timing = tier.write("entry", b"x" * 100_000)
    assert isinstance(timing, StorageBackend.IOTiming)
    data, timing = tier.read("entry")
    assert data == b"x" * 100_000
    assert isinstance(timing, StorageBackend.IOTiming)
    {entries}
    print("arguments", *sys.argv[1:])
"""
_SCRIPT: Final = "if __name__ == '__main__':\n    main()\n"
_PACKAGE: Final = "from entries.cache import MultiTierCache\nfrom entries.cache import main\n"


@pytest.fixture(params=["one file", "package"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A program whose cache is in its script, or in a package beside it."""
    return _write(tmp_path / "program", request.param)


def _write(folder: Path, form: str = "one file", entries: str = "pass") -> Path:
    folder.mkdir()
    cache = _CACHE.replace("{entries}", entries)
    script = folder / "kv-cache.py"
    if form == "one file":
        script.write_text(cache + _SCRIPT)
    else:
        (folder / "entries").mkdir()
        (folder / "entries" / "__init__.py").touch()
        (folder / "entries" / "cache.py").write_text(cache)
        script.write_text(_PACKAGE + _SCRIPT)
    return folder


def _run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvio.connectors.mlperf_kv", *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _options(folder: Path, store: str = "memory") -> tuple[str, ...]:
    return "--program", str(folder), "--store", store


def test_the_program_runs_on_a_store(folder: Path, tmp_path: Path) -> None:
    """Wherever its cache looks its tier up; what went through kvio is said."""
    url = f"posix-tmpfile://{tmp_path}/kv?create=true&durability=visible"

    done = _run(*_options(folder, url))

    assert done.returncode == 0, done.stderr
    assert "[KVIO] <kvio.Store posix-tmpfile://" in done.stdout
    assert "wrote 1 entries (0.00 GiB), read 1 (0.00 GiB, cold), deleted 0" in done.stdout
    assert "failed 0" in done.stdout


def test_everything_behind_two_dashes_is_the_programs(folder: Path, tmp_path: Path) -> None:
    """Also what looks like an option of ours. Without them there are no arguments."""
    done = _run(
        *_options(folder, "hybrid"), "--durability", "visible", "--", tmp_path / "kv", "--store"
    )

    assert done.returncode == 0, done.stderr
    assert f"arguments {tmp_path / 'kv'} --store" in done.stdout
    assert (tmp_path / "kv").is_dir()


def test_the_environment_names_program_and_store(folder: Path) -> None:
    """For launchers that pass no options."""
    done = _run(KVIO_MLPERF_KV=str(folder), KVIO_MLPERF_KV_STORE="memory")

    assert done.returncode == 0, done.stderr
    assert "[KVIO] <kvio.Store memory://" in done.stdout


def test_a_backends_name_alone_has_a_directory_for_the_run(folder: Path) -> None:
    """As the program's own tier without ``--cache-dir``; nothing is left of it."""
    done = _run(*_options(folder, "posix-tmpfile"), "--durability", "visible")

    assert done.returncode == 0, done.stderr
    place = done.stdout.partition("posix-tmpfile://")[2].split()[0]
    assert place.endswith("/kv")
    assert not Path(place).parent.exists()


def test_a_tier_is_put_in_front_of_a_store(folder: Path, tmp_path: Path) -> None:
    """With ``--stage``; at the end what it accepted is stored."""
    url = f"posix-tmpfile://{tmp_path}/kv?create=true&durability=visible"

    done = _run(*_options(folder, url), "--stage", "4MiB")

    assert done.returncode == 0, done.stderr
    assert "[KVIO] <kvio.StagingTier" in done.stdout
    with kvio.open_store(tmp_path / "kv") as store:
        assert list(store.list_keys()) == ["kv-cache/entry"]


def test_files_are_durable_unless_told_otherwise(folder: Path) -> None:
    """The program's own tier syncs every entry, and a store that cannot says so."""
    shared = Path("/dev/shm")  # memory on every Linux
    if not os.access(shared, os.W_OK):
        pytest.skip("/dev/shm is not writable")
    place = shared / f"kvio-test-{os.getpid()}"

    done = _run(*_options(folder, f"posix-tmpfile://{place}?create=true"))

    assert done.returncode == 2
    assert "durability='durable'" in done.stderr


def test_files_are_read_in_pieces_that_a_write_need_not_wait_for_long(
    folder: Path, tmp_path: Path
) -> None:
    """Of 2 MiB; a URL that says another length has its own."""
    place = f"{tmp_path}/kv?create=true&durability=visible"

    done = _run(*_options(folder, f"posix-tmpfile://{place}&chunk_bytes=1"))

    assert done.returncode == 2
    assert "chunk_bytes" in done.stderr
    assert _run(*_options(folder, f"posix-tmpfile://{place}&chunk_bytes=4MiB")).returncode == 0
    with _opened(f"posix-tmpfile://{place}", None, stage=None, durability=None) as store:
        assert isinstance(store, kvio.Store)
        assert store.url.options["chunk_bytes"] == "2MiB"


def test_two_places_are_refused(folder: Path, tmp_path: Path) -> None:
    """A URL that has one, and the program's own directory: neither is taken in silence."""
    done = _run(*_options(folder), "--", tmp_path / "cache")

    assert done.returncode == 2
    assert "two places" in done.stderr


def test_a_failure_fails_a_run_that_passes_over_it(tmp_path: Path) -> None:
    """The program ignores what a tier raises, and reports good times."""
    folder = _write(
        tmp_path / "program",
        entries=f"""
    open({str(tmp_path)!r} + "/block", "w").close()
    import glob
    for path in glob.glob({str(tmp_path)!r} + "/kv/*/*/*"):
        os.truncate(path, 10)
    try:
        tier.read("entry")
    except Exception:
        pass
""",
    )
    url = f"posix-tmpfile://{tmp_path}/kv?create=true&durability=visible"

    done = _run(*_options(folder, url))

    assert done.returncode == 1
    assert "failed 1; the first failure: CorruptBlockError" in done.stdout


def test_a_run_without_a_storage_tier_fails(tmp_path: Path) -> None:
    """As in the program's trace mode: nothing went through kvio."""
    folder = _write(tmp_path / "program")
    script = folder / "kv-cache.py"
    script.write_text(_CACHE + "\ndef main():\n    print('traced')\n")

    done = _run(*_options(folder))

    assert done.returncode == 1
    assert "nothing went through kvio" in done.stderr


def test_the_programs_status_is_that_of_the_command(tmp_path: Path) -> None:
    """What it exits with, and text it exits with is printed."""
    for number, (ends, status) in enumerate(
        (("sys.exit(3)", 3), ("sys.exit('no such model')", 1), ("sys.exit()", 0))
    ):
        folder = _write(tmp_path / f"program{number}", entries=ends)
        done = _run(*_options(folder))
        assert done.returncode == status
        assert ("no such model" in done.stderr) == ("model" in ends)


def test_what_is_no_such_program_is_said(tmp_path: Path) -> None:
    """A folder without the script, and a script without what kvio needs, by name."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(kvio.ConfigError, match=r"there is no kv-cache\.py"):
        load(tmp_path / "empty")
    other = tmp_path / "other"
    other.mkdir()
    (other / "kv-cache.py").write_text("class MultiTierCache:\n    def __init__(self): pass\n")
    with pytest.raises(kvio.ConfigError, match=r"no main, NVMeBackend, StorageBackend\.IOTiming"):
        load(other)


def test_a_library_that_the_program_lacks_is_named(tmp_path: Path) -> None:
    """With the command that installs it."""
    folder = tmp_path / "program"
    folder.mkdir()
    (folder / "kv-cache.py").write_text("import no_such_library_of_kvio\n")

    with pytest.raises(kvio.MissingDependencyError, match="no_such_library_of_kvio"):
        load(folder)


def test_without_program_or_store_the_usage_says_so(folder: Path) -> None:
    """Neither has a default."""
    for arguments, missing in (
        (("--store", "memory"), "--program"),
        (_options(folder)[:2], "--store"),
    ):
        done = _run(*arguments, KVIO_MLPERF_KV="", KVIO_MLPERF_KV_STORE="")
        assert done.returncode == 2
        assert f"give {missing}" in done.stderr
