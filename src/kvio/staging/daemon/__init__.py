"""The drain daemon: staging memory that outlives the processes that write to it."""
