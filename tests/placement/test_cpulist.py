"""Lists of CPUs: what the kernel writes is read, anything else is refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvio
from kvio.filesystem.sysfs import MAX_NUMBER, parse_number
from kvio.placement import format_cpulist, parse_cpulist


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("", ()),
        ("\n", ()),
        ("0\n", (0,)),
        ("0-3,8,10-11\n", (0, 1, 2, 3, 8, 10, 11)),
        ("5,1-2,2", (1, 2, 5)),
        (f"{MAX_NUMBER}", (MAX_NUMBER,)),
    ],
)
def test_a_list_of_the_kernel_is_read(text: str, numbers: tuple[int, ...]) -> None:
    """Ascending, each number once."""
    assert parse_cpulist(text) == numbers


@pytest.mark.parametrize(
    "text",
    [
        *("3-1", "-1", "1-", ",", "1,,2", "1 2", "a", "0x1", "1-2-3", "1.0", "+1", "\0", "0-3:1/2"),
        *("²", "٣", "1_0", "65536", "0-999999999999999999999", "9" * 5000, "1\n2", "\udc80"),
    ],
)
def test_what_is_no_list_is_refused_by_name(text: str) -> None:
    """The complaint says where the text is from, and is short however long that is."""
    with pytest.raises(kvio.ConfigError, match=r"^/sys/x: ") as caught:
        parse_cpulist(text, source="/sys/x")

    assert len(str(caught.value)) < 200


@given(st.sets(st.integers(0, 300)))
def test_what_is_written_is_read_back(numbers: set[int]) -> None:
    """And is as short as the kernel's: no two neighbours are apart."""
    text = format_cpulist(numbers)

    assert parse_cpulist(text) == tuple(sorted(numbers))
    ends = [part.split("-") for part in text.split(",") if part]
    assert all(int(a[-1]) + 1 < int(b[0]) for a, b in pairwise(ends))


@given(st.text())
def test_any_text_is_a_list_or_refused(text: str) -> None:
    """Nothing else is raised, and no number is out of bounds."""
    try:
        numbers = parse_cpulist(text)
    except kvio.ConfigError:
        return

    assert all(0 <= number <= MAX_NUMBER for number in numbers)


@pytest.mark.parametrize("text", ["-1\n", "-7", "", "x", "0 1", "1.5", "99999999", None, "²"])
def test_minus_one_and_nonsense_are_unknown(text: str | None) -> None:
    """None, never 0."""
    assert parse_number(text) is None


def test_a_number_is_read() -> None:
    """With the newline that the kernel ends it with."""
    assert parse_number("0\n") == 0
    assert parse_number("17\n") == 17
