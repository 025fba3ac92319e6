"""The contract of a store, as `kvio.testing` has it, on a staging tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kvio
from kvio.testing.batches import BatchTests
from kvio.testing.closing import ClosingTests
from kvio.testing.looking import LookingTests
from kvio.testing.reading import ReadingTests
from kvio.testing.submitted import SubmittedTests
from kvio.testing.writing import WritingTests

#: Tests of what is a store's alone.
_STORES_ALONE = (
    # A tier has counts and a name of its own, and its receipts go on after the call.
    *("test_counts_add_up", "test_memory_that_cannot_be_filled_is_refused"),
    *("test_repr_says_what_is_open", "test_capabilities_are_promises_in_the_positive"),
    *("test_receipt_is_immutable", "test_receipt_says_what_was_stored"),
    *("test_receipts_of_a_batch_are_those_of_single_writes", "test_sweep_leaves_blocks_alone"),
    # It overwrites by default, and `existed` is in the receipt of the store: test_tier*.py.
    *("test_awaited_calls_give_what_plain_calls_give", "test_keep_leaves_the_standing_block"),
    *("test_keep_replaces_a_block_of_another_length", "test_taken_keys_in_a_batch"),
    *("test_replace_writes_whatever_stands_there", "test_a_generous_timeout_changes_no_answer"),
    "test_a_finished_write_leaves_nothing_but_the_block",
    # What it stages has no file, and it takes none: that is for its store.
    "test_the_path_of_a_block_is_a_file_that_begins_with_it",
    "test_a_file_under_an_invalid_key_is_refused",
    *(
        "test_files_of_every_size_are_stored_as_they_are",
        "test_a_file_that_cannot_be_read_is_refused",
    ),
    "test_a_file_whose_block_is_there_follows_if_exists",
    "test_a_closed_store_refuses_every_call",  # it has no `sweep`; below
)


class TestStagingTier(
    WritingTests, ReadingTests, LookingTests, BatchTests, SubmittedTests, ClosingTests
):
    """Everything else that a store must do; what is in storage is tested on stores."""

    large_sizes = (3_000_000,)

    def open(self, tmp_path: Path) -> Any:
        """Open a tier before a store of files; closing it closes the store."""
        root = tmp_path / "root"
        root.mkdir(exist_ok=True)
        store = kvio.open_store("posix-tmpfile", root=root)
        return kvio.stage(store, "64MiB", close_store=True)


for _name in _STORES_ALONE:
    assert hasattr(TestStagingTier, _name)
    setattr(TestStagingTier, _name, None)
