"""One file that many writers fill, beside a file each, plain system calls, C and IOR.

After Kang, Walters and Crago, "Scalable Parallel File Write from a Large NUMA System": aggregate
bandwidth by writers, through the page cache and past it, by where the writers run.
"""
