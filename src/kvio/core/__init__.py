"""How a call runs: stores, batches, deadlines, threads, buffers, counters."""
