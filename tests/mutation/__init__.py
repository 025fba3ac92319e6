"""Mutants made by hand, mutants that change nothing, and the tool that runs both."""
