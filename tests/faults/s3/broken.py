"""S3 backends that believe too early or too much, to see that the matrix finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from kvio.registry import load_backend
from kvio.s3 import body
from kvio.s3.conditions import Refused
from kvio.s3.objects import Got

Method = Callable[..., Any]


def _ignores_the_length(get_into: Method) -> Method:
    """An answer that ends early is taken for all there is."""

    def get(self: object, name: str, parts: Any, start: int, stop: int | None, **more: Any) -> Got:
        try:
            got: Got = get_into(self, name, parts, start, stop, **more)
        except Refused:
            room = body.total_bytes(parts)
            nbytes = room if stop is None else min(room, stop - start)
            return Got(nbytes, start + nbytes)
        return got

    return get


def _receipt_before_the_answer(put: Method) -> Method:
    """What was sent is taken for what was stored."""

    def send(self: object, *arguments: Any, **more: Any) -> None:
        with suppress(Refused):
            put(self, *arguments, **more)

    return send


def _half_a_list_is_a_list(list_names: Method) -> Method:
    """A listing that fails is taken for one that has ended."""

    def names(self: object, prefix: str) -> Iterator[str]:
        try:
            yield from list_names(self, prefix)
        except Refused:
            return

    return names


#: By name: the method that is broken, and how.
MUTANTS: Final[dict[str, tuple[str, Callable[[Method], Method]]]] = {
    "ignores the length": ("get_into", _ignores_the_length),
    "receipt before the answer": ("put", _receipt_before_the_answer),
    "half a list is a list": ("list_names", _half_a_list_is_a_list),
}


@contextmanager
def backend(library: str, mutant: str) -> Iterator[None]:
    """Break a library's backend for a while; with no name leave it as it is."""
    if not mutant:
        yield
        return
    kind: Any = load_backend(library)
    attribute, broken = MUTANTS[mutant]
    sound = vars(kind.library)[attribute]
    setattr(kind.library, attribute, broken(sound))
    try:
        yield
    finally:
        setattr(kind.library, attribute, sound)
