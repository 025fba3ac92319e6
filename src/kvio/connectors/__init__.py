"""Adapt other libraries' storage interfaces to a store; import each connector separately."""
