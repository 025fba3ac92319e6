"""A small S3 server that keeps its objects in memory, and the raw client that measures it."""
