"""I/O modes: decisions are pure, calibrations travel, damaged ones are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvio
from kvio.errors import ConfigError
from kvio.filesystem.io_mode import (
    BY_SIZE,
    CACHE_AWARE,
    COLD_READ_DIRECT_FROM,
    READ_DIRECT_FROM,
    WRITE_DIRECT_FROM,
    Always,
    Calibration,
    Decision,
    Hybrid,
    Step,
    dump_calibration,
    load_calibration,
)
from kvio.types import IOMode, KiB, MiB

_MODES = [IOMode.BUFFERED, IOMode.DONTCACHE, IOMode.DIRECT]
sizes = st.integers(0, 1 << 42)
concurrencies = st.integers(1, 10_000)


def rows(limits: set[int]) -> st.SearchStrategy[tuple[Step, ...]]:
    """Make a row with a step at each limit, ascending, and a last one for all that is left."""
    bounds = [*sorted(limits), None]
    return st.tuples(
        *(st.builds(Step, st.just(bound), st.sampled_from(_MODES)) for bound in bounds)
    )


tables = st.dictionaries(
    st.integers(1, 256), st.sets(sizes, max_size=4).flatmap(rows), min_size=1, max_size=3
)
calibrations = st.builds(Calibration, tables, tables, st.text(max_size=20))


@pytest.mark.parametrize("mode", _MODES)
@pytest.mark.parametrize("nbytes", [0, 1, MiB, 1 << 40])
def test_always_takes_its_one_mode(mode: IOMode, nbytes: int) -> None:
    """A fixed policy decides the same for every size and concurrency, unconditionally."""
    policy = Always(mode)

    for concurrency in (1, 64):
        for decision in (
            policy.for_write(nbytes, concurrency),
            policy.for_read(nbytes, concurrency),
        ):
            assert (decision.mode, decision.unless_hot) == (mode, False)
            assert decision.reason


def test_without_calibration_the_thresholds_are_those_of_the_design() -> None:
    """Writes are direct from 2 MiB, reads from 8 MiB, below they are buffered."""
    policy = Hybrid(BY_SIZE)

    assert (2 * MiB, 8 * MiB) == (WRITE_DIRECT_FROM, READ_DIRECT_FROM)
    for concurrency in (1, 7, 1000):
        for nbytes, write, read in (
            (0, IOMode.BUFFERED, IOMode.BUFFERED),
            (2 * MiB - 1, IOMode.BUFFERED, IOMode.BUFFERED),
            (2 * MiB, IOMode.DIRECT, IOMode.BUFFERED),
            (8 * MiB - 1, IOMode.DIRECT, IOMode.BUFFERED),
            (8 * MiB, IOMode.DIRECT, IOMode.DIRECT),
            (1 << 40, IOMode.DIRECT, IOMode.DIRECT),
        ):
            assert policy.for_write(nbytes, concurrency).mode is write
            assert policy.for_read(nbytes, concurrency).mode is read


@given(calibration=calibrations, nbytes=sizes, concurrency=concurrencies)
def test_decisions_follow_the_calibration(
    calibration: Calibration, nbytes: int, concurrency: int
) -> None:
    """A size takes the first step it lies below, at the nearest concurrency measured."""
    policy = Hybrid(calibration)
    for table, decide in (
        (calibration.write, policy.for_write),
        (calibration.read, policy.for_read),
    ):
        below = [level for level in table if level <= concurrency]
        row = table[max(below) if below else min(table)]
        fitting = [s.mode for s in row if s.below_nbytes is None or nbytes < s.below_nbytes]

        decision = decide(nbytes, concurrency)

        assert decision.mode is fitting[0]
        assert str(nbytes) in decision.reason
        assert decide(nbytes, concurrency) == decision


def test_where_the_page_cache_can_be_asked_cold_reads_are_direct_from_64_kib() -> None:
    """Only what is cold is read directly there, so smaller blocks may be; writes are as ever."""
    assert 64 * KiB == COLD_READ_DIRECT_FROM
    for nbytes, mode in (
        (64 * KiB - 1, IOMode.BUFFERED),
        (64 * KiB, IOMode.DIRECT),
        (1 << 40, IOMode.DIRECT),
    ):
        decision = Hybrid(CACHE_AWARE).for_read(nbytes, 1)
        assert (decision.mode, decision.unless_hot) == (mode, mode is IOMode.DIRECT)
    assert CACHE_AWARE.write == BY_SIZE.write


@given(calibration=calibrations, nbytes=sizes, concurrency=concurrencies)
def test_only_direct_reads_ask_the_page_cache(
    calibration: Calibration, nbytes: int, concurrency: int
) -> None:
    """A read that would be direct is so unless the block is hot; nothing else depends on that."""
    policy = Hybrid(calibration)
    read = policy.for_read(nbytes, concurrency)

    assert read.unless_hot == (read.mode is IOMode.DIRECT)
    assert not policy.for_write(nbytes, concurrency).unless_hot


@given(calibration=calibrations, one=st.sampled_from(_MODES), other=st.sampled_from(_MODES))
def test_a_mode_can_be_replaced_everywhere(
    calibration: Calibration, one: IOMode, other: IOMode
) -> None:
    """Replacing a mode changes it in every step and nothing else."""
    changed = calibration.replacing(one, other)

    for before, after in ((calibration.write, changed.write), (calibration.read, changed.read)):
        assert before.keys() == after.keys()
        for level, steps in before.items():
            assert [s.below_nbytes for s in steps] == [s.below_nbytes for s in after[level]]
            modes = [other if s.mode is one else s.mode for s in steps]
            assert [s.mode for s in after[level]] == modes
    assert changed.reason == calibration.reason


@given(calibration=calibrations)
def test_a_calibration_survives_its_file(calibration: Calibration) -> None:
    """What was dumped is loaded again, equal, whatever was measured beside it."""
    text = dump_calibration(calibration, {"samples": [1.5, None, "x"]})

    assert load_calibration(text, "file") == calibration


def good() -> dict[str, Any]:
    """Return a good calibration file's content."""
    content: dict[str, Any] = json.loads(dump_calibration(BY_SIZE, {}))
    return content


def test_another_version_is_refused() -> None:
    """A file of a version that is not known is refused by name, with the advice to tune again."""
    for version in (0, 2, "1", None):
        with pytest.raises(ConfigError, match=r"the/file.*tune again"):
            load_calibration(json.dumps(good() | {"version": version}), "the/file")


@pytest.mark.parametrize(
    "change",
    [
        {"write": {}},
        {"write": None},
        {"write": []},
        {"write": {"1": []}},
        {"write": {"one": [{"below_nbytes": None, "mode": "direct"}]}},
        {"read": {"1": [{"below_nbytes": -1, "mode": "direct"}]}},
        {"read": {"1": [{"below_nbytes": "5", "mode": "direct"}]}},
        {"read": {"1": [{"below_nbytes": 1.5, "mode": "direct"}]}},
        {"read": {"1": [{"below_nbytes": True, "mode": "direct"}]}},
        {"read": {"1": [{"below_nbytes": None, "mode": "fast"}]}},
        {"read": {"1": [{"below_nbytes": None, "mode": "memory"}]}},
        {"read": {"1": [{"mode": "direct"}]}},
        {"read": {"1": ["direct"]}},
        {"read": {"1": "direct"}},
    ],
    ids=json.dumps,
)
def test_a_damaged_table_is_refused(change: dict[str, Any]) -> None:
    """Every part that cannot be is a ConfigError that names the file."""
    with pytest.raises(ConfigError, match="the/file"):
        load_calibration(json.dumps(good() | change), "the/file")


@pytest.mark.parametrize("missing", ["version", "write", "read", "reason"])
def test_a_missing_part_is_refused(missing: str) -> None:
    """A file without one of its parts is a ConfigError."""
    content = good()
    del content[missing]

    with pytest.raises(ConfigError, match="the/file"):
        load_calibration(json.dumps(content), "the/file")


def test_every_truncation_is_refused() -> None:
    """A file that was cut short anywhere is a ConfigError."""
    text = dump_calibration(BY_SIZE, {"a": 1})
    for end in range(len(text)):
        with pytest.raises(ConfigError, match="the/file"):
            load_calibration(text[:end], "the/file")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    content=json_values
    | st.builds(
        lambda key, value: good() | {key: value},
        st.sampled_from(["version", "write", "read", "reason"]),
        json_values,
    )
)
def test_any_json_is_a_calibration_or_a_config_error(content: Any) -> None:
    """No JSON value makes loading fail in another way, or gives a table that cannot decide."""
    try:
        calibration = load_calibration(json.dumps(content), "file")
    except ConfigError:
        return
    for nbytes in (0, MiB, 1 << 40):
        for concurrency in (1, 8):
            assert isinstance(Hybrid(calibration).for_read(nbytes, concurrency), Decision)
            assert isinstance(Hybrid(calibration).for_write(nbytes, concurrency), Decision)


@given(text=st.text(max_size=60) | st.just("[" * 100_000))
def test_any_text_is_a_calibration_or_a_config_error(text: str) -> None:
    """No text makes loading fail in another way, however deep it nests."""
    with pytest.raises(ConfigError):
        load_calibration(text, "file")


def test_a_store_uses_the_calibration_in_its_root(real_disk: Path) -> None:
    """``hybrid`` takes the mode that was measured for the mount, and says so in the receipt."""
    always = Calibration(
        write={1: (Step(None, IOMode.DIRECT),)},
        read={1: (Step(None, IOMode.BUFFERED),)},
        reason="measured for this test",
    )
    (real_disk / ".kvio-calibration.json").write_text(dump_calibration(always, {}))
    with kvio.open_store("hybrid", root=real_disk) as store:
        if not store.capabilities.direct_io:
            pytest.skip("no direct I/O here: capabilities.direct_io")
        receipt = store.write_block("small", b"a few bytes")

    assert receipt.mode is IOMode.DIRECT
    assert "measured for this test" in receipt.reason
    with kvio.open_store(f"hybrid://{real_disk}?calibration=none") as store:
        assert store.write_block("other", b"a few bytes").mode is IOMode.BUFFERED


def test_a_store_refuses_a_damaged_calibration(real_disk: Path) -> None:
    """A broken calibration file stops the opening with its name, and is not ignored."""
    (real_disk / ".kvio-calibration.json").write_text('{"version": 1')

    with pytest.raises(ConfigError, match="kvio-calibration"):
        kvio.open_store("hybrid", root=real_disk)
