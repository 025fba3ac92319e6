"""What a directory lies on, as far as the kernel shows it, and what its fsync is worth."""
