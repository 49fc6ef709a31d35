# SPDX-License-Identifier: Apache-2.0
"""The error of a read or write that did not do what was asked for."""

import errno
import os

_ADVICE = {
    errno.ENOSPC: "the disk is full: free space, or use a folder on a larger one",
    errno.EDQUOT: "the quota of the disk is used up: free space, or use a folder on another one",
    errno.EFBIG: "the file is larger than this process may write (ulimit -f) or than the file system holds",
    errno.ENOENT: "the folder or file does not exist (any more)",
    errno.EACCES: "this user may not",
    errno.EROFS: "the file system is mounted read-only",
    errno.EIO: "the device failed: look at the kernel's log",
    errno.EMFILE: "too many open files (ulimit -n)",
    errno.ENODATA: "the file is shorter than what was asked for: it was cut off, or written by something else",
}


class AsyncIOError(OSError):
    """A read or write of a file failed, was cut short, or could not begin.

    Attributes:
        errno: of the first failure; ``ENODATA`` where the file ended early.
        filename: the file.
        operation: ``"read"``, ``"write"`` or ``"open"``.
        offset: position in the file, in bytes, of the first byte that was asked for.
        error_offset: position in the file of the first failure.
        wanted: bytes asked for.
        done: bytes moved before and beside the failure; they need not be the first ones.
    """

    def __init__(
        self, number: int, filename: str, operation: str, offset: int, error_offset: int, wanted: int, done: int
    ) -> None:
        reason = f"{os.strerror(number)}: {_ADVICE[number]}" if number in _ADVICE else os.strerror(number)
        place = f"at byte {error_offset}; {done} of {wanted} bytes from byte {offset} on are done"
        if operation == "open":
            place = "nothing was read or written"
        super().__init__(number, f"{operation} failed, {reason} ({place})", filename)
        self.operation = operation
        self.offset = offset
        self.error_offset = error_offset
        self.wanted = wanted
        self.done = done

    def __reduce__(self) -> tuple:
        arguments = (self.errno, self.filename, self.operation, self.offset, self.error_offset, self.wanted, self.done)
        return type(self), arguments
