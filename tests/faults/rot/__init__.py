"""Bit rot: whatever changes in what is stored, a reader notices, and never returns it.

Damaged are the files of blocks, objects of S3 in the same layout, sealed shared files and the maps
of unfinished ones. What has no format of ours cannot rot unnoticed by us: the staging tier spills
to files without names that hold bytes alone and end with their process, and manifests of
checkpoints are blocks like others. ``layout=plain`` keeps no checksum, by its nature.
"""
