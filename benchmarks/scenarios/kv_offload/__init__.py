"""KV-cache offload: requests look up their prefix, load the hits and offload the misses.

After the connector test of the change proposal "Better tmp file handling" (llm-d-kv-cache #600; 300
requests of 12,000 tokens), but it waits for the writes, times lookup, load and offload apart, and
empties the page cache before requests come again.
"""
