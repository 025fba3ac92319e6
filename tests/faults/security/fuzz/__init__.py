"""Bytes of strangers into every parser: each takes them or refuses them, and none falls over."""
