"""A machine of our own to take the power from, or to run file systems in that this one has not."""
