"""One module or package per scenario: what is run, what is claimed of it, how it is shown."""
