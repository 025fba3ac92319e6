"""The raw client of a clone's ``benchmarks/s3mem``: found, loaded, and asked single things."""

from __future__ import annotations

import importlib.util
import os
import re
import ssl
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import unescape

from kvio import ConfigError, StorageError, UnsupportedError

_RAW: Final = Path("benchmarks", "s3mem", "rawcalls.py")
_ENTRY: Final = re.compile(rb"<Contents>.*?</Contents>", re.DOTALL)
_KEY: Final = re.compile(rb"<Key>([^<]*)</Key>")
_SIZE: Final = re.compile(rb"<Size>(\d+)</Size>")


def find() -> Path:
    """Find the raw client from the current directory up, then from this package's own up.

    Raises:
        UnsupportedError: there is none.
    """
    for place in (Path.cwd(), Path(__file__).resolve()):
        for directory in (place, *place.parents):
            if (directory / _RAW).is_file():
                return directory / _RAW
    raise UnsupportedError(f"no {_RAW} here or above, nor above the kvio package: needs a clone")


def load(path: Path) -> Any:
    """Import the raw client from its file; it needs the standard library alone."""
    name = "kvio_s3_raw_client"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def endpoint(module: Any, url: str, region: str, environ: Mapping[str, str]) -> Any:
    """Make the raw client's endpoint; credentials and CA as the environment has them."""
    tls = None
    if url.startswith("https:"):
        tls = ssl.create_default_context(cafile=environ.get("AWS_CA_BUNDLE"))
    made = module.Endpoint.of(
        url, environ["AWS_ACCESS_KEY_ID"], environ["AWS_SECRET_ACCESS_KEY"], tls=tls
    )
    object.__setattr__(made, "region", region)  # frozen, and its constructor by URL has no region
    return made


class Inspector:
    """Looks at what was stored, without any of the libraries that stored it."""

    def __init__(self, url: str, region: str, bucket: str, environ: Mapping[str, str]) -> None:
        self._module = load(find())
        self._bucket = bucket
        self._endpoint = endpoint(self._module, url, region, environ)
        try:
            self._client = self._connect()
        except OSError as exc:
            raise ConfigError(f"{url}: {exc.strerror or exc}") from None

    def make_bucket(self) -> None:
        """Make the bucket of a private server."""
        self._expect(self._call("PUT", f"/{self._bucket}", body=b""), "make the bucket")

    def check_bucket(self) -> None:
        """See that the bucket is there and may be read.

        Raises:
            ConfigError: it is not.
        """
        answer = self._call("GET", f"/{self._bucket}", {"list-type": "2", "max-keys": "1"})
        if answer.status != 200:
            said = re.search(rb"<Code>(\w+)</Code>", answer.body)
            code = said[1].decode() if said else ""
            raise ConfigError(f"bucket {self._bucket!r}: the server answers {answer.status} {code}")

    def sizes(self, prefix: str) -> dict[str, int]:
        """List every object below a prefix with its length."""
        found: dict[str, int] = {}
        query = {"list-type": "2", "prefix": prefix, "max-keys": "1000"}
        after = ""
        while True:
            extra = {"start-after": after} if after else {}
            answer = self._call("GET", f"/{self._bucket}", {**query, **extra})
            self._expect(answer, "list")
            page = dict(_entries(answer.body))
            found |= page
            if b"<IsTruncated>true" not in answer.body or not page:
                return found
            after = max(page)

    def holds(self, key: str, payload: bytes) -> bool:
        """Tell whether an object begins with these bytes."""
        extent = {"range": f"bytes=0-{len(payload) - 1}"}
        first = self._call("GET", f"/{self._bucket}/{key}", headers=extent)
        return bool(first.status == 206 and first.body == payload)

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects."""
        for key in keys:
            self._call("DELETE", f"/{self._bucket}/{key}")

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _connect(self) -> Any:
        return self._module.Client(self._endpoint, most_bytes=32 << 20)

    def _call(self, *request: Any, **more: Any) -> Any:
        try:
            return self._client.call(*request, **more)
        except OSError:  # servers close a connection on which nothing is asked for a while
            self._client.close()
            self._client = self._connect()
            return self._client.call(*request, **more)

    def _expect(self, answer: Any, what: str) -> None:
        if answer.status != 200:
            raise StorageError(f"cannot {what}: the server answers {answer.status}")


def _entries(page: bytes) -> Iterator[tuple[str, int]]:
    for entry in _ENTRY.findall(page):
        key, size = _KEY.search(entry), _SIZE.search(entry)
        if key and size:
            yield unescape(key[1].decode()), int(size[1])


def environment_of(access: str, secret: str, region: str) -> dict[str, str]:
    """Give this process's environment with other credentials, for a child."""
    kept = {name: value for name, value in os.environ.items() if name != "AWS_SESSION_TOKEN"}
    return {
        **kept,
        "AWS_ACCESS_KEY_ID": access,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_REGION": region,
        "AWS_DEFAULT_REGION": region,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
