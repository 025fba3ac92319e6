"""Names to backends: kvio's own, and those of a distribution that is really installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvio
from kvio import registry

OWN = {"memory", "posix-tmpfile", "posix-direct", "hybrid"}
DISTRIBUTION = Path(__file__).parent / "plugin_dist"

#: Runs in an interpreter that has the third party's distribution on its path.
_ASK = """
import json, sys
import kvio
answer = {"names": kvio.backend_names()}
for name in sys.argv[1:]:
    try:
        with kvio.open_store(name) as store:
            store.write_block("key", b"bytes")
            answer[name] = [type(store).__name__, bytes(store.read_block("key")).decode()]
    except Exception as exc:
        answer[name] = [type(exc).__name__, str(exc)]
print(json.dumps(answer))
"""


def test_kvios_own_backends_are_registered_like_any_other() -> None:
    """All four are found by their entry points, sorted and once."""
    names = kvio.backend_names()

    assert set(names) >= OWN
    assert names == sorted(set(names))


@pytest.mark.parametrize("name", sorted(OWN))
def test_a_backend_is_loaded_by_its_name(name: str) -> None:
    """The class that is loaded carries the name it is registered under."""
    assert registry.load_backend(name).name == name


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("hybird", "hybrid"), ("posix-tmp-file", "posix-tmpfile"), ("Memory", "memory")],
)
def test_an_unknown_name_suggests_the_nearest(wrong: str, near: str) -> None:
    """A slip of the pen is answered with the name that was meant."""
    with pytest.raises(kvio.UnknownBackendError, match=f"did you mean '{near}'"):
        kvio.open_store(f"{wrong}://x")


def test_a_name_like_no_other_lists_what_there_is() -> None:
    """Where nothing is near, the installed names are listed."""
    with pytest.raises(kvio.UnknownBackendError, match=r"installed: .*hybrid.*memory") as caught:
        kvio.open_store("zzzzzz")

    assert isinstance(caught.value, LookupError)


def run(command: list[str], path: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command with a directory of distributions on its path."""
    source = Path(kvio.__file__).parents[1]  # this kvio, however it was put on the path
    environment = os.environ | {"PYTHONPATH": f"{path}{os.pathsep}{source}"}
    return subprocess.run(
        command, env=environment, cwd=cwd, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the third party's distribution and install it into a directory, without a network."""
    pytest.importorskip("setuptools", "77", reason="setuptools is too old to build with, or absent")
    if shutil.which("pip", path=str(Path(sys.executable).parent)) is None:
        pytest.importorskip("pip", reason="pip is not installed here")
    source = tmp_path_factory.mktemp("source") / "dist"
    shutil.copytree(DISTRIBUTION, source)
    target = tmp_path_factory.mktemp("installed")
    options = ("--no-build-isolation", "--no-deps", "--no-index", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target)]

    done = run([*command, str(source)], target, target)

    assert done.returncode == 0, done.stdout + done.stderr
    return target


def ask(installed: Path, *names: str) -> dict[str, Any]:
    """Open stores in an interpreter that has the third party's distribution."""
    done = run([sys.executable, "-c", _ASK, *names], installed, installed)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_a_third_partys_backend_is_found(installed: Path) -> None:
    """An installed distribution's entry point is a backend like kvio's own, options and all."""
    answer = ask(installed, "shelf://top?colour=blue", "shelf://top?colour=green", "shef")

    assert {"shelf", *OWN} <= set(answer["names"])
    assert answer["shelf://top?colour=blue"] == ["Store", "bytes"]
    assert answer["shelf://top?colour=green"][0] == "ConfigError"
    assert "did you mean 'shelf'" in answer["shef"][1]


def test_a_missing_library_is_named_with_its_extra(installed: Path) -> None:
    """A backend whose library is missing says what to install, and stops nobody else."""
    answer = ask(installed, "shelf-needy", "shelf")

    kind, message = answer["shelf-needy"]
    assert kind == "MissingDependencyError"
    assert "no_such_library" in message
    assert "pip install 'kvio-shelf[shelf-needy]'" in message
    assert answer["shelf"] == ["Store", "bytes"]


def test_a_mistake_of_the_third_party_is_not_hidden(installed: Path) -> None:
    """An import error of its own module is raised as it is, not as a missing extra."""
    kind, message = ask(installed, "shelf-broken")["shelf-broken"]

    assert kind == "ModuleNotFoundError"
    assert "kvio_shelf.forgotten" in message


def test_what_is_no_backend_is_refused(installed: Path) -> None:
    """An entry point that names something else is a ConfigError that names it."""
    kind, message = ask(installed, "shelf-stranger")["shelf-stranger"]

    assert kind == "ConfigError"
    assert "kvio_shelf.stranger:StrangerBackend" in message


def test_a_name_that_two_distributions_register_is_refused(installed: Path) -> None:
    """Nobody can take over a name unnoticed: both claims are named."""
    kind, message = ask(installed, "memory")["memory"]

    assert kind == "ConfigError"
    assert "kvio_shelf.backend:ShelfBackend" in message
    assert "kvio.backends.memory:MemoryBackend" in message


def test_a_third_party_runs_the_contract(installed: Path, tmp_path: Path) -> None:
    """The shipped suite passes over the third party's backend, in a pytest run of its own."""
    shutil.copy(DISTRIBUTION / "test_shelf.py", tmp_path)
    options = ("-q", "-W", "error", "--strict-markers", "-p", "no:cacheprovider")

    done = run([sys.executable, "-m", "pytest", *options, str(tmp_path)], installed, tmp_path)

    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout


def test_the_suite_runs_over_a_url(tmp_path: Path) -> None:
    """``--kvio-url`` runs the shipped suite over any store; without it the tests skip."""
    command = [sys.executable, "-m", "pytest", "--pyargs", "kvio.testing.test_url", "-q"]
    options = ["-p", "no:cacheprovider", "-k", "range or keep", "-W", "error"]

    named = run([*command, *options, "--kvio-url", "posix-tmpfile://{tmp}"], tmp_path, tmp_path)
    unnamed = run([*command, *options], tmp_path, tmp_path)

    assert named.returncode == 0, named.stdout[-3000:] + named.stderr[-1000:]
    assert " passed" in named.stdout
    assert " skipped" in unnamed.stdout
    assert " passed" not in unnamed.stdout
