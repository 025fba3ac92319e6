"""Facts about file systems, and the choice of the I/O mode."""
