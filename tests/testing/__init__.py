"""The contract suite for backends, and its fakes."""
