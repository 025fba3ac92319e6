"""The staging tier against memory, the page cache and the disk: checkpoints of many ranks.

After Miller and Atchley, "Utilizing Unused Resources To Improve Checkpoint Performance", who put
idle GPU memory in front of a parallel file system.
"""
