"""A secret that was given to kvio is in nothing that kvio shows, logs, raises, pickles or prints.

What a store over S3 does with credentials while it works is looked at in tests/s3/test_secrets.py,
by library and verb; here are the other ways in, and all that hangs on an error.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import pickle
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest

import kvio
from kvio.cli.app import run
from kvio.url import Secret
from tests.faults.totals import Tally
from tests.s3.failing import BUCKET, SMALL, VERBS, Verb, honoured, prepare, registered
from tests.s3.faulty import FaultyServer
from tests.s3.libraries import LIBRARIES, open_s3, require

ACCESS: Final = "AKIACANARY00ACCESSKEY"
SECRET: Final = "canary/secret+0000key"
TOKEN: Final = "canarytoken0000=="
PASSWORD: Final = "canary-password-0000"
ALONE: Final = "s3+s3dlio"
#: What the server does.
WORDS: Final = ("e403", "e500", "badsig", "trunc", "flip", "reset")
CANARIES: Final = (ACCESS, SECRET, TOKEN, PASSWORD, "canary%2Fsecret", "canary-pass")


def assert_clean(text: str, where: str) -> None:
    """Fail where a canary is in a text, without repeating it."""
    found = [canary[:8] for canary in CANARIES if canary in text]
    assert not found, f"{where} shows {found}"


def everything(error: BaseException, seen: set[int] | None = None) -> Iterator[str]:
    """Yield all that hangs on an error and on those it came from: texts, fields, notes."""
    seen = set() if seen is None else seen
    if id(error) in seen:
        return
    seen.add(id(error))
    yield "".join(traceback.format_exception(error))
    yield f"{error} {error!r} {error.args!r} {vars(error)!r} {getattr(error, '__notes__', '')!r}"
    names = [name for kind in type(error).__mro__ for name in getattr(kind, "__slots__", ())]
    yield repr([getattr(error, name, None) for name in names])
    for other in (error.__cause__, error.__context__):
        if other is not None:
            yield from everything(other, seen)


def assert_error_is_clean(error: BaseException, where: str) -> None:
    """Look at an error and its pickle."""
    for text in everything(error):
        assert_clean(text, where)
    if isinstance(error, kvio.KvioError):
        assert_clean(pickle.dumps(error).decode("latin-1"), f"the pickle of {where}")


URLS: Final = (
    f"s3+boto3://{ACCESS}:{PASSWORD}@bucket/x",
    f"s3://user:{PASSWORD}@bucket",
    f"s3+minio://bucket/x?secret_key={SECRET}",
    f"s3+minio://bucket/x?access_key={ACCESS}&secret_key=canary%2Fsecret%2B0000key",
    f"s3+torch://bucket/x?session_token={TOKEN}#y",
    f"posix-tmpfile://user:{PASSWORD}@host/root",
    f"hybrid:///root?password={PASSWORD}",
    f"nonsense://x:{PASSWORD}@y",
    f"http://u:{PASSWORD}@localhost:9000",
    f"s3+boto3://bucket?endpoint_url=http://u:{PASSWORD}@localhost:1",
    f"s3+boto3://bucket?endpoint_url=https://localhost:1/?X-Amz-Security-Token={TOKEN}",
    f"s3+boto3://bucket\n?secret_key={SECRET}",
    f"s3+boto3://[bucket?secret_key={SECRET}",
)


@pytest.mark.parametrize("url", URLS, ids=[str(n) for n in range(len(URLS))])
def test_no_url_with_credentials_is_repeated(
    url: str, tally: Tally, caplog: pytest.LogCaptureFixture
) -> None:
    """It is refused, because URLs get into logs; and what is said of it does not repeat them."""
    with caplog.at_level(logging.DEBUG):
        with pytest.raises(kvio.KvioError) as caught:
            kvio.open_store(url)
        assert_error_is_clean(caught.value, f"the error of URL {URLS.index(url)}")
    for record in caplog.records:
        assert_clean(f"{record.getMessage()} {record.args!r}", "a log record")
    tally.add(names=1)


@pytest.mark.parametrize("url", URLS, ids=[str(n) for n in range(len(URLS))])
def test_no_command_prints_credentials(
    url: str, tally: Tally, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is typed wrong is complained of without its secrets, on both outputs."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)

    assert run(["ls", url]) != 0

    said = capfd.readouterr()
    assert_clean(said.out + said.err, f"kvio ls of URL {URLS.index(url)}")
    tally.add(names=1)


def test_a_secret_is_shown_by_nobody() -> None:
    """The type of a secret shows it in none of Python's ways to make text of things."""
    secret = Secret(SECRET)
    texts = (
        repr(secret),
        str(secret),
        f"{secret}",
        f"{secret!r:>40}",
        "%s" % secret,  # noqa: UP031  # one of the ways
        repr({"key": secret}),
        repr([secret]),
        json.dumps({"key": secret}, default=repr),
    )
    for text in texts:
        assert_clean(text, "a secret")
    for keep in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError) as caught:
            keep(secret)
        assert_clean(str(caught.value), "the refusal to keep a secret")


def in_a_process_of_its_own(library: str) -> int:
    """Run the next test for a library that knows one server in a process; how many requests."""
    require(library)
    test = f"{__file__}::test_no_error_of_a_store_holds_a_secret_anywhere[{library}]"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "KVIO_TEST_ALONE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert "1 passed" in done.stdout
    counted = re.search(r"^faults: ([\d,]+) requests", done.stdout, re.MULTILINE)
    assert counted is not None, done.stdout[-2000:]
    return int(counted.group(1).replace(",", ""))


def look_everywhere(
    library: str, caplog: pytest.LogCaptureFixture, verbs: Mapping[str, Verb], words: Sequence[str]
) -> tuple[int, int]:
    """Look at all that a store shows over a server that misbehaves; its requests and errors."""
    registered(library)
    errors = 0
    options = {"retries": 0, "session_token": TOKEN, "conditional": "trust"}
    with FaultyServer() as server, caplog.at_level(logging.DEBUG, logger="kvio"):
        store = open_s3(
            library,
            server.endpoint,
            BUCKET,
            prefix="p",
            options=honoured(library, {**options, "access_key": ACCESS, "secret_key": SECRET}),
        )
        with store:
            for word in words:
                prepare(server, word)
                for verb in ("write", "read", "stat", "list", "delete"):
                    try:
                        verbs[verb](store, f"{word}/{verb}/block")
                    except kvio.KvioError as error:
                        errors += 1
                        assert_error_is_clean(error, f"{verb} after {word}")
                for result in store.write_blocks([(f"{word}/many", SMALL)]):
                    assert_clean(repr(result), "a result")
            assert_clean(repr(store.stats()) + repr(store.capabilities), "a store")
            assert_clean(repr(vars(store)), "a store's fields")
        requests = len(server.requests)
    for record in caplog.records:
        if record.name.partition(".")[0] == "kvio":
            assert_clean(f"{record.getMessage()} {record.args!r}", "a log record")
    return requests, errors


@pytest.mark.parametrize("library", LIBRARIES)
def test_no_error_of_a_store_holds_a_secret_anywhere(
    library: str, tally: Tally, caplog: pytest.LogCaptureFixture
) -> None:
    """Fields, causes, contexts, notes and pickles of every error of every verb, and kvio's logs."""
    if library == ALONE and "KVIO_TEST_ALONE" not in os.environ:
        tally.add(requests=in_a_process_of_its_own(library))
        return
    requests, errors = look_everywhere(library, caplog, VERBS, WORDS)
    tally.add(requests=requests)
    assert errors > len(WORDS)


def _hide_in_field(error: kvio.KvioError) -> None:
    error.__dict__["seen"] = {"authorization": f"AWS4 {ACCESS}"}


def _hide_in_cause(error: kvio.KvioError) -> None:
    error.__cause__ = OSError(5, f"request with {TOKEN} failed")


def _hide_in_context(error: kvio.KvioError) -> None:
    middle = ValueError("something else")
    middle.__context__ = KeyError(SECRET)
    error.__cause__ = middle


def _hide_in_log(_: kvio.KvioError) -> None:
    logging.getLogger("kvio.backends.s3").debug("signed with %s", SECRET)


#: Where a kvio that shows its secrets could hide one.
LEAKS: Final[dict[str, Callable[[kvio.KvioError], None]]] = {
    "a note": lambda error: error.add_note(f"key {SECRET}"),
    "a field": _hide_in_field,
    "a cause": _hide_in_cause,
    "a context of a cause": _hide_in_context,
    "a log": _hide_in_log,
}


@pytest.mark.parametrize("place", LEAKS)
def test_a_store_that_tells_a_secret_is_found(
    place: str, tally: Tally, caplog: pytest.LogCaptureFixture
) -> None:
    """One that hangs a secret on an error of a single verb, or logs it, is reported."""
    tally.add(mutants=1)

    def stat(store: kvio.Store, key: str) -> object:
        try:
            return VERBS["stat"](store, key)
        except kvio.KvioError as error:
            LEAKS[place](error)
            raise

    with pytest.raises(AssertionError, match="shows") as caught:
        look_everywhere("s3+minio", caplog, {**VERBS, "stat": stat}, WORDS[:1])
    assert_clean(str(caught.value), "the complaint")
    tally.add(caught=1)
