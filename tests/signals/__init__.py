"""Signals that come while kvio works, in processes of their own."""
