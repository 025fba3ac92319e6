"""The in-memory S3 server as a process of its own, and the raw client that talks to it."""

from __future__ import annotations

import importlib.util
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from benchmarks.s3mem import rawcalls

__all__ = (
    "ACCESS", "DIRECTORY", "SECRET", "client_of", "code_of", "elements", "new_bucket", "rawcalls",
    "running",
)  # fmt: skip

DIRECTORY: Final = Path(__file__).parents[2] / "benchmarks" / "s3mem"
ACCESS: Final = "AKIDEXAMPLE"
SECRET: Final = "a secret/with+signs"

_numbers = itertools.count(1)


def _load(path: Path) -> ModuleType:
    """Import a file that is in no package on the path of the tests."""
    spec = importlib.util.spec_from_file_location(f"s3mem_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if not TYPE_CHECKING:
    rawcalls = _load(DIRECTORY / "rawcalls.py")


@contextmanager
def running(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a server; its process and its URL."""
    command = [
        sys.executable, str(DIRECTORY / "server.py"), "--access", ACCESS, "--secret", SECRET,
        "--until-stdin-closes", *options,
    ]  # fmt: skip
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.stdin.close()
            process.wait(30)


def client_of(
    url: str, *, access: str = ACCESS, secret: str = SECRET, now: float | None = None
) -> rawcalls.Client:
    """Return a client of the server at *url*."""
    return rawcalls.Client(rawcalls.Endpoint.of(url, access, secret), now=now)


def new_bucket(client: rawcalls.Client) -> str:
    """Make a bucket that nobody else has."""
    name = f"bucket-{next(_numbers)}"
    assert client.call("PUT", f"/{name}", body=b"").status == 200
    return name


def code_of(answer: rawcalls.Answer) -> str:
    """Return the status and the code of a refusal, such as ``404 NoSuchKey``."""
    found = re.search(rb"<Code>(\w+)</Code>", answer.body)
    return f"{answer.status} {found[1].decode() if found else ''}".strip()


def elements(body: bytes, name: str) -> list[str]:
    """Return the texts of all elements of that name in a document, by eye and not by parser."""
    return [
        text.decode() for text in re.findall(rb"<%b>([^<]*)</%b>" % ((name.encode(),) * 2), body)
    ]
