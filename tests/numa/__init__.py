"""A machine with two memory nodes, made by QEMU, and what kvio does on it."""
