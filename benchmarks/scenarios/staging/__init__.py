"""Checkpoints of many ranks: into the staging tier, the page cache, the disk, and by memcpy."""
