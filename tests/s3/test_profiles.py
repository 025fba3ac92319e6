"""Region, endpoint and credentials from the user's AWS profile."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

import kvio
from kvio.backends.s3 import profiles
from kvio.backends.s3.options import options_from_url
from kvio.url import parse_url
from tests.s3.failing import registered
from tests.s3.faulty import FaultyServer
from tests.s3.servers import Endpoint

pytest.importorskip("boto3", reason="boto3 is not installed")

#: minio knows the keys of a profile, no programs; s3dlio knows one server in a process.
LIBRARIES: Final = ("s3+boto3", "s3+obstore", "s3+torch", "s3")

Write = Callable[[str], None]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return what writes the profile file; nothing else of AWS is in the environment."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")

    def write(text: str) -> None:
        (tmp_path / ".aws").mkdir(exist_ok=True)
        (tmp_path / ".aws/config").write_text(text)

    return write


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_profile_is_enough_to_open_a_store(
    library: str,
    config: Write,
    s3_endpoint: Endpoint,
    s3_bucket: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its program prints the credentials, and it names region and endpoint."""
    if library != "s3":
        registered(library)
    program = tmp_path / "login.py"
    keys = {"AccessKeyId": s3_endpoint.access_key, "SecretAccessKey": s3_endpoint.secret_key}
    program.write_text(f"print({json.dumps({'Version': 1, **keys})!r})")
    config(
        "[default]\nregion = nowhere-1\nendpoint_url = http://127.0.0.1:1\n"
        f"[profile work]\nregion = {s3_endpoint.region}\n"
        f"credential_process = {sys.executable} {program}\nservices = local\n"
        f"[services local]\ns3 =\n  endpoint_url = {s3_endpoint.url}\n"
    )
    monkeypatch.setenv("AWS_PROFILE", "work")
    with kvio.open_store(f"{library}://{s3_bucket}/p") as store:
        store.write_block("key", b"bytes")

        assert bytes(store.read_block("key")) == b"bytes"
        assert s3_endpoint.secret_key not in repr(store) + str(store.url)


def test_what_is_named_elsewhere_comes_before_the_profile(
    config: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First options, then the environment, then the profile, then the default."""

    def options(query: str = "") -> tuple[str, str | None]:
        found = options_from_url(parse_url(f"s3+boto3://bucket/p{query}"))
        return found.region, found.endpoint_url

    assert options() == ("us-east-1", None)
    config("[default]\nregion = eu-1\nendpoint_url = http://profile:1\n")
    assert options() == ("eu-1", "http://profile:1")
    monkeypatch.setenv("AWS_REGION", "env-1")
    assert options() == ("env-1", "http://profile:1")
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    assert options() == ("env-1", None)
    assert options("?region=own-1&endpoint_url=http://own:1") == ("own-1", "http://own:1")


def test_a_missing_profile_is_named(config: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any request, and by the name that the environment has."""
    config("[default]\nregion = eu-1\n")
    monkeypatch.setenv("AWS_PROFILE", "wrok")

    with pytest.raises(kvio.ConfigError, match="wrok"):
        kvio.open_store("s3://bucket/p")


def test_without_files_botocore_is_not_asked(
    config: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its import takes longer than opening a store."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert profiles.settings() == {}
    assert not profiles.Credentials(aws=True).there()
    config("[default]\nregion = eu-1\n")
    assert profiles.settings() == {}  # it is not installed


@pytest.mark.parametrize("library", ["s3+boto3", "s3+obstore"])
@pytest.mark.parametrize(
    "text", ["raise SystemExit('CANARY')", "print('CANARY')", "print('[\"CANARY\"]')", None]
)
def test_a_program_that_fails_is_named_without_its_words(
    library: str, text: str | None, config: Write, tmp_path: Path, faulty: FaultyServer
) -> None:
    """What it prints may be a secret; nothing is asked without credentials."""
    program = tmp_path / "login.py"
    if text is not None:
        program.write_text(text)
    python = sys.executable if text is not None else tmp_path / "none"
    config(f"[default]\ncredential_process = {python} {program}\n")
    with pytest.raises((kvio.ConfigError, kvio.AccessDeniedError)) as caught:
        kvio.open_store(f"{library}://bucket/p", options={"endpoint_url": faulty.url})

    told = "".join(traceback.format_exception(caught.value))
    assert "CANARY" not in told.replace(str(program), "")
    assert faulty.requests == []


def test_only_aws_gets_the_credentials_of_an_instance(
    config: Write, faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another endpoint is no place for them: the service that has them is not even asked."""
    config("[default]\nregion = eu-1\n")
    with FaultyServer() as instance:
        monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", instance.url)
        with pytest.raises(kvio.AccessDeniedError) as caught:
            kvio.open_store("s3+obstore://bucket/p", options={"endpoint_url": faulty.url})

        assert caught.value.errno == errno.ENOKEY
        assert instance.requests == []
        assert faulty.requests == []
        assert profiles.Credentials(aws=True).there() is False
        assert instance.requests  # where it may be asked, it is


def test_credentials_in_the_options_need_no_profile(
    config: Write, faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile of another program may be missing."""
    config("[default]\nregion = eu-1\n")
    monkeypatch.setenv("AWS_PROFILE", "wrok")
    options = {"endpoint_url": faulty.url, "access_key": "a", "secret_key": "b"}

    kvio.open_store("s3+obstore://bucket/p", options=options).close()


def test_credentials_are_asked_for_again_before_they_end(config: Write, tmp_path: Path) -> None:
    """A process that renews them is run again; what is handed on ends within ten minutes."""
    program = tmp_path / "login.py"
    program.write_text(
        "import pathlib, time\n"
        f"count = pathlib.Path({str(tmp_path / 'count')!r})\n"
        "number = int(count.read_text()) + 1 if count.exists() else 1\n"
        "count.write_text(str(number))\n"
        "ends = time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(time.time() + 60))\n"
        'print(\'{"Version": 1, "AccessKeyId": "key-%d", "SecretAccessKey": "secret", \'\n'
        '      \'"Expiration": "%s"}\' % (number, ends))\n'
    )
    config(f"[default]\ncredential_process = {sys.executable} {program}\n")
    provide = profiles.Credentials(aws=False)

    assert provide.there()
    first, second = provide(), provide()
    assert first["access_key_id"] != second["access_key_id"]
    assert first["expires_at"] is not None
