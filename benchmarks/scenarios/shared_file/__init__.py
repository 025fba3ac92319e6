"""One file that many writers fill, beside a file each, plain system calls, C and IOR.

After J.-H. Kang, J. P. Walters and S. P. Crago, "Scalable Parallel File Write from a Large NUMA
System": aggregate bandwidth by the number of writers, buffered and direct, by where they run.
"""
