"""Mutation testing of the C core, the POSIX backends, shared files, staging and connectors.

``python -m tools.mutants`` records which test reaches which statement, draws a sample of mutants,
runs for each the tests that reach it, and prints a table. universalmutator makes the mutants:
it is the one generator that is kept up, knows both C and Python, and needs no network and no
build of its own. What it does not do is here: stratified sampling, discarding mutants that
compile to the same code, choosing tests, and running many mutants a minute.
"""
