"""Store URLs and options: what they mean, and what is refused with a reason."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvio
from kvio.errors import ConfigError
from kvio.url import StoreURL, parse_size, parse_url, typed_options


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("memory", StoreURL("memory")),
        ("memory://", StoreURL("memory")),
        ("posix-tmpfile:///mnt/kv", StoreURL("posix-tmpfile", "", "/mnt/kv")),
        ("hybrid:///a%20b/%23c", StoreURL("hybrid", "", "/a b/#c")),
        ("hybrid:///a?x=1&y=", StoreURL("hybrid", "", "/a", {"x": "1", "y": ""})),
        ("hybrid:///a?x=a%26b", StoreURL("hybrid", "", "/a", {"x": "a&b"})),
        ("s3+boto3://bucket/prefix", StoreURL("s3+boto3", "bucket", "/prefix")),
    ],
)
def test_a_url_has_its_parts(text: str, expected: StoreURL) -> None:
    """Scheme, host, path and options are taken apart and unquoted."""
    assert parse_url(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "://", "/mnt/kv", "a b://x", "hybrid:/mnt", "..", "hyb\nrid:///a", "hybrid\0"),
        *("hybrid://[", "hybrid:///a\nb", "hybrid:///a\tb", " hybrid:///a", "hybrid:///a\x00b"),
        *("hybrid:///a?x=1&x=2", "hybrid:///a#part", "s3://user:secret@bucket/x"),
    ],
)
def test_what_is_no_url_is_refused(text: str) -> None:
    """Malformed URLs, options given twice, fragments and credentials are ConfigErrors."""
    with pytest.raises(ConfigError):
        parse_url(text)


def test_credentials_are_not_repeated() -> None:
    """The refusal of credentials does not print them."""
    with pytest.raises(ConfigError) as caught:
        parse_url("s3://user:hunter2@bucket/x")

    assert "hunter2" not in str(caught.value)


@given(text=st.text(max_size=40) | st.from_regex(r"[a-z0-9+-]{1,8}://[ -~]{0,30}", fullmatch=True))
def test_any_text_is_a_url_or_a_config_error(text: str) -> None:
    """No text makes the parser fail in another way."""
    try:
        parsed = parse_url(text)
    except ConfigError:
        return

    assert isinstance(parsed, StoreURL)


@given(
    path=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20),
    options=st.dictionaries(
        st.text("abcdef_", min_size=1, max_size=5),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=10),
        max_size=4,
    ),
)
def test_quoted_paths_and_options_come_back(path: str, options: dict[str, str]) -> None:
    """Whatever is quoted as URLs are comes back as it was."""
    query = "&".join(f"{quote(k, safe='')}={quote(v, safe='')}" for k, v in options.items())

    parsed = parse_url(f"hybrid:///{quote(path, safe='/')}?{query}")

    assert parsed == StoreURL("hybrid", "", f"/{path}", options)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (512, 512),
        ("512", 512),
        ("0", 0),
        ("4KiB", 4096),
        ("4 kib", 4096),
        ("4k", 4096),
        ("1.5MiB", 3 << 19),
        ("2GiB", 2 << 30),
        ("2gb", 2 * 10**9),
        ("3MB", 3 * 10**6),
        ("10B", 10),
        (" 8 KiB ", 8192),
    ],
)
def test_sizes_have_units(text: str | int, nbytes: int) -> None:
    """Powers of 1024 with an i or a single letter, powers of 1000 with KB, MB, GB."""
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "B", "MiB", "4 PiB", "4iB", "four", "4MiBs", "nan", "inf", "1e400", "4,5MiB"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    """Anything else is a ConfigError that shows how a size is written."""
    with pytest.raises(ConfigError, match="4MiB"):
        parse_size(text)


@given(text=st.text("0123456789.eE+-kmgibKMGIB x", max_size=10))
def test_any_text_is_a_size_or_a_config_error(text: str) -> None:
    """No text makes a size fail in another way."""
    try:
        size = parse_size(text)
    except ConfigError:
        return

    assert isinstance(size, int)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One field of every kind that backends have."""

    root: str
    mode: Literal["fast", "safe"] = "fast"
    nbytes: int = 5
    share: float = 0.5
    create: bool = False
    limit: int | None = None


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("mode", "safe", "safe"),
        ("nbytes", "4KiB", 4096),
        ("nbytes", 7, 7),
        ("share", "0.25", 0.25),
        ("share", 1, 1.0),
        *(("create", text, True) for text in ("1", "true", "yes", "on", "True", True)),
        *(("create", text, False) for text in ("0", "false", "no", "off", "OFF", False)),
        ("limit", "none", None),
        ("limit", None, None),
        ("limit", "9", 9),
    ],
)
def test_options_take_the_type_of_their_field(name: str, value: Any, expected: Any) -> None:
    """Text from a URL and values from keywords become the field's type."""
    options = typed_options(Options, {"root": "/r", name: value})

    assert getattr(options, name) == expected
    assert type(getattr(options, name)) is type(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "'root' is needed"),
        ({"root": "/r", "mod": "fast"}, "did you mean 'mode'"),
        ({"root": "/r", "zzz": "1"}, "known: root, mode"),
        ({"root": "/r", "mode": "slow"}, "one of 'fast', 'safe'"),
        ({"root": "/r", "nbytes": "many"}, "many"),
        ({"root": "/r", "nbytes": True}, "nbytes"),
        ({"root": "/r", "share": "half"}, "share"),
        ({"root": "/r", "create": "maybe"}, "true or false"),
        ({"root": 5}, "root"),
    ],
)
def test_wrong_options_say_what_is_wrong(options: dict[str, Any], message: str) -> None:
    """An unknown, missing or wrong option is a ConfigError that names it and helps."""
    with pytest.raises(ConfigError, match=message):
        typed_options(Options, options)


def test_keywords_and_url_mean_the_same(tmp_path: Path) -> None:
    """An option in the URL, as a keyword or in ``options`` opens the same store."""
    url = f"posix-tmpfile://{tmp_path}?layout=plain&chunk_bytes=128KiB"
    with (
        kvio.open_store(url) as one,
        kvio.open_store(f"posix-tmpfile://{tmp_path}", layout="plain") as two,
        kvio.open_store("posix-tmpfile", root=tmp_path, options={"layout": "plain"}) as three,
    ):
        one.write_block("dir/block", b"bytes")

        assert (tmp_path / "dir" / "block").read_bytes() == b"bytes"
        assert [bytes(s.read_block("dir/block")) for s in (two, three)] == [b"bytes"] * 2


@pytest.mark.parametrize(
    ("url", "keywords"),
    [
        ("posix-tmpfile://{root}?layout=plain", {"layout": "block"}),
        ("posix-tmpfile://{root}", {"root": "/elsewhere"}),
        ("posix-tmpfile", {}),
        ("posix-tmpfile://host{root}", {}),
        ("posix-tmpfile://relative", {}),
        ("posix-tmpfile://{root}?speed=high", {}),
        ("posix-tmpfile://{root}?durability=sometimes", {}),
        ("posix-tmpfile://{root}?chunk_bytes=1000", {}),
        ("posix-tmpfile://{root}/missing", {}),
        ("posix-tmpfile://{root}/file", {}),
        ("posix-tmpfile://{root}", {"io_threads": 0}),
        ("posix-tmpfile://{root}", {"timeout": 0}),
        ("posix-tmpfile://{root}", {"timeout": -1}),
        ("posix-tmpfile://{root}", {"max_queued_bytes": 0}),
        ("posix-tmpfile://{root}", {"max_queued_bytes": "lots"}),
        ("memory://somewhere", {}),
        ("memory:///path", {}),
    ],
)
def test_a_store_that_cannot_be_is_a_config_error(
    tmp_path: Path, url: str, keywords: dict[str, Any]
) -> None:
    """Contradictions, missing roots and impossible settings are refused when opening."""
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError):
        kvio.open_store(url.format(root=tmp_path), **keywords)


def test_a_promise_that_cannot_be_kept_is_refused() -> None:
    """Memory is not durable, and says so instead of pretending."""
    with pytest.raises(kvio.UnsupportedError, match="durable"):
        kvio.open_store("memory://?durability=durable")
