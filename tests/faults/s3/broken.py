"""S3 backends that trust too early or too much, to see that the matrix finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from kvio.backends.s3 import body
from kvio.backends.s3.client import UNKNOWN, GetResult
from kvio.backends.s3.errors import ErrorKind, RequestFailed
from kvio.backends.s3.retries import RetryPolicy
from kvio.registry import load_backend

Method = Callable[..., Any]


def _ignores_the_length(get_into: Method) -> Method:
    """An answer that ends early is taken for all there is."""

    def get(
        self: object, name: str, parts: Any, start: int, stop: int | None, **more: Any
    ) -> GetResult:
        try:
            got: GetResult = get_into(self, name, parts, start, stop, **more)
        except RequestFailed:
            room = body.total_bytes(parts)
            nbytes = room if stop is None else min(room, stop - start)
            return GetResult(nbytes, start + nbytes if stop is None else UNKNOWN)
        return got

    return get


def _receipt_before_the_answer(put: Method) -> Method:
    """What was sent is taken for what was stored, where the server fails but does not refuse.

    Who trusts that of a refusal too is found out by the store itself, when it tries a wrong
    checksum: it reads every durable block back then.
    """

    def send(self: object, *arguments: Any, **more: Any) -> None:
        try:
            put(self, *arguments, **more)
        except RequestFailed as failed:
            if failed.kind is not ErrorKind.BUSY:
                raise

    return send


def _half_a_list_is_a_list(list_names: Method) -> Method:
    """A listing that fails is taken for one that has ended."""

    def names(self: object, prefix: str) -> Iterator[str]:
        try:
            yield from list_names(self, prefix)
        except RequestFailed:
            return

    return names


def _a_lost_page_is_the_end(list_names: Method) -> Method:
    """A page that fails after others have come is taken for the end."""

    def names(self: object, prefix: str) -> Iterator[str]:
        found = False
        try:
            for name in list_names(self, prefix):
                found = True
                yield name
        except RequestFailed:
            if not found:
                raise

    return names


def _gives_nothing_up(put: Method) -> Method:
    """An upload that failed is left to the server."""

    def send(self: Any, *arguments: Any, **more: Any) -> None:
        for name in ("abort_multipart_upload", "_abort_multipart_upload"):
            if hasattr(self._client, name):
                setattr(self._client, name, lambda *_, **__: None)
        put(self, *arguments, **more)

    return send


def _checks_no_payload(_: Method) -> Method:
    """Only the trailer of what was read is looked at."""
    return lambda *_: None


def _asks_again_whatever_it_was(call: Method) -> Method:
    """What may have been carried out is asked for again, though that cannot be distinguished."""

    def ask(self: object, *arguments: Any, **more: Any) -> Any:
        return call(self, *arguments, **{**more, "once_only": False})

    return ask


#: By name: what is broken (the library's file where there is None), which attribute, and how.
MUTANTS: Final[dict[str, tuple[Any, str, Callable[[Method], Method]]]] = {
    "ignores the length": (None, "get_into", _ignores_the_length),
    "receipt before the answer": (None, "put", _receipt_before_the_answer),
    "half a list is a list": (None, "list_names", _half_a_list_is_a_list),
    "a lost page is the end": (None, "list_names", _a_lost_page_is_the_end),
    "gives nothing up": (None, "put", _gives_nothing_up),
    "checks no payload": (body, "check_payload", _checks_no_payload),
    "asks again whatever it was": (RetryPolicy, "__call__", _asks_again_whatever_it_was),
}


@contextmanager
def backend(library: str, mutant: str) -> Iterator[None]:
    """Break a library's backend for a while; with no name leave it as it is."""
    if not mutant:
        yield
        return
    kind: Any = load_backend(library)
    owner, attribute, broken = MUTANTS[mutant]
    owner = owner or kind.library
    sound = vars(owner)[attribute]
    setattr(owner, attribute, broken(sound))
    try:
        yield
    finally:
        setattr(owner, attribute, sound)
