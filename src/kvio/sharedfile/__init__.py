"""One file that many processes write, each its own part; see docs/sharedfile.md."""

from kvio.sharedfile.file import SharedFile
from kvio.sharedfile.layout import Extent, Missing
from kvio.sharedfile.opening import SharedFileOptions, SharedFileStatus

__all__ = ["Extent", "Missing", "SharedFile", "SharedFileOptions", "SharedFileStatus"]
