"""What the S3 backends share: the block contract over objects, and one table of failures.

A library's file in `kvio.backends` says how to move bytes with it (`objects.Objects`) and what its
exceptions mean (`conditions.Refused`); everything else is here, once.
"""
