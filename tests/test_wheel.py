"""What a release holds: every file of the package, no file but these; run by ``nox -s wheel``."""

from __future__ import annotations

import os
import subprocess
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

TREE = Path(__file__).parent.parent
NOT_RELEASED = {".gitignore", ".ci/as-user", ".ci/run"}
METADATA = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}


@pytest.fixture(scope="module")
def dist() -> Path:
    folder = os.environ.get("KVIO_DIST")
    if folder is None:
        pytest.skip("needs built distributions: nox -s wheel")
    return Path(folder)


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    [found] = dist.glob("*.whl")
    return found


def _version() -> str:
    project = tomllib.loads((TREE / "pyproject.toml").read_text())["project"]
    return str(project["version"])


def test_the_wheel_is_for_every_python_from_3_11_on(wheel: Path) -> None:
    """The name says abi3 of CPython 3.11, so one wheel serves all later versions."""
    _, version, python, abi, platform = wheel.stem.split("-")

    assert (version, python, abi) == (_version(), "cp311", "abi3")
    assert platform.startswith("linux")


def test_the_wheel_holds_exactly_the_package(wheel: Path) -> None:
    """Every module, the type marker, the compiled core and the metadata; no source of C."""
    source = TREE / "src"
    modules = {str(path.relative_to(source)) for path in source.rglob("*.py")}
    info = f"kvio-{_version()}.dist-info"
    expected = modules | {"kvio/py.typed", "kvio/_native/_core.abi3.so"}
    expected |= {f"{info}/{name}" for name in METADATA}

    with zipfile.ZipFile(wheel) as file:
        assert set(file.namelist()) == expected


def test_the_sdist_holds_exactly_what_git_knows(dist: Path) -> None:
    """Nothing that is needed to build, test or read is forgotten, and nothing else slips in."""
    if not (TREE / ".git").exists():
        pytest.skip("needs a git checkout to compare with")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=TREE, capture_output=True, text=True, check=True).stdout
    known = {name for name in listed.splitlines() if (TREE / name).exists()} - NOT_RELEASED
    [sdist] = dist.glob("*.tar.gz")

    with tarfile.open(sdist) as file:
        names = {member.name.partition("/")[2] for member in file if member.isfile()}
    made = {name for name in names if name == "PKG-INFO" or ".egg-info/" in name}
    assert names - made == known
