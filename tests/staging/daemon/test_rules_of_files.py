"""Blocks that are written like files: as in a tier of one's own, where the rules apply.

Files of a daemon's client gather their bytes outside of the tier, so that its room is no subject.
"""

from __future__ import annotations

from tests.staging.test_files import (  # noqa: F401
    spilling,
    store,
    test_a_child_process_cannot_use_files_of_its_parent,
    test_a_file_left_by_an_exception_publishes_nothing,
    test_a_header_can_be_patched_when_the_rest_is_written,
    test_a_staged_block_of_this_length_is_kept,
    test_an_aborted_file_publishes_nothing_and_cannot_be_used,
    test_files_of_any_length_are_blocks,
    test_it_answers_what_programs_ask_a_file,
    test_nothing_is_seen_of_a_file_before_it_is_closed,
    test_the_file_of_a_key_that_is_closed_last_wins,
    tier,
)
