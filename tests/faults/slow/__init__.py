"""Media that hang or are slow: deadlines hold, what is queued is bounded, nobody else waits."""
