"""The command line, as a user runs it: in a process of its own, by output and exit status."""
