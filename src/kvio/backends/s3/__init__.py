"""Implement the block contract over S3 objects for every S3 library.

A library's file in `kvio.backends` moves bytes (`objects.Objects`) and maps the library's
exceptions to `conditions.ErrorKind`. Everything else is here, once for all libraries.
"""
