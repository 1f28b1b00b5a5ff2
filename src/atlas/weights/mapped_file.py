"""A model file mapped read-only into memory: the one place that opens weight files."""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atlas.errors import ClosedError, ModelFileError


class MappedFile:
    """A regular, non-empty file as read-only memory.

    Pages are read when they are touched and belong to the page cache, so a mapped file costs
    resident but no anonymous memory. The file must not be truncated while it is mapped.

    Parameters
    ----------
    path : str or os.PathLike

    Attributes
    ----------
    size : int
        Bytes.
    identity : (str, int, int)
        Real path, bytes, and time of the last change in ns; equal is taken for unchanged.

    Raises
    ------
    ModelFileError
        The path is missing, unreadable, empty, or not a regular file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        try:
            # Without O_NONBLOCK, opening a FIFO would wait for a writer.
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise ModelFileError(f"{self.path}: {error.strerror}") from error
        except ValueError as error:
            raise ModelFileError(f"{self.path!r}: {error}") from error
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ModelFileError(f"{self.path}: not a regular file")
            if status.st_size == 0:
                raise ModelFileError(f"{self.path}: the file is empty (0 bytes)")
            self.size = status.st_size
            self.identity = (os.path.realpath(self.path), status.st_size, status.st_mtime_ns)
            self._mapping: mmap.mmap | None = mmap.mmap(
                descriptor, self.size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ
            )
        except OSError as error:
            raise ModelFileError(f"{self.path}: cannot map: {error.strerror}") from error
        finally:
            os.close(descriptor)

    @property
    def buffer(self) -> mmap.mmap:
        """The mapping itself, for parsing; slices of it are copies."""
        if self._mapping is None:
            raise ClosedError(f"{self.path} was closed")
        return self._mapping

    def array(self, dtype: np.dtype[Any], offset: int, count: int) -> NDArray[Any]:
        """`count` elements at byte `offset`: a read-only view, or a copy where misaligned."""
        view = np.frombuffer(self.buffer, dtype=dtype, count=count, offset=offset)
        return view if view.flags.aligned else view.copy()

    def release(self, offset: int, nbytes: int) -> None:
        """Drop the pages that hold these bytes from memory; touching them reads them again."""
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        if nbytes:
            self.buffer.madvise(mmap.MADV_DONTNEED, start, offset + nbytes - start)

    def close(self) -> None:
        """Unmap. Arrays handed out stay valid: the last of them to go unmaps the file."""
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            # BufferError: arrays still point into the mapping, which lives until they are gone.
            with contextlib.suppress(BufferError):
                mapping.close()
