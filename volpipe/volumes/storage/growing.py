"""Files that are written piece by piece, and appear whole or not at all: on a disk, or by parts in a bucket.

Not here: what is in them (writer), or requests (object_store).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from volpipe.volumes.storage import object_store
from volpipe.volumes.storage.object_store import Remote
from volpipe.volumes.storage.paths import Location, partial_of, sync

if TYPE_CHECKING:
    from obstore import WritableFile

# Of a part of an upload. S3 takes 5 MiB at least, but for the last one, and 10,000 of them at most: 80 GB.
PART_BYTES, MOST_PARTS = 8 << 20, 10_000
PARTS_AT_ONCE = 2
PIECE_BYTES = 8 << 20
PERSISTED_BYTES = 64 << 20  # at a time, of a file on a disk


class GrowingFile:
    """A file on a disk, beside its place until `close`; after `abort` what was there before is."""

    def __init__(self, file: Path) -> None:
        self._file, self._partial = file, partial_of(file)
        self._crc = self._num_read = 0  # checksum of the bytes that were read back
        self._num_written = 0  # bytes

    def write(self, pieces: Sequence[bytes]) -> None:
        """Append `pieces`, one after the other."""
        self._partial.parent.mkdir(parents=True, exist_ok=True)
        with self._partial.open("ab") as file:
            file.writelines(pieces)
        self._num_written += sum(map(len, pieces))

    def settle(self) -> None:
        """Wait until no piece is on its way, so that little is in memory: all are in the file."""

    def reorder(self, spans: Sequence[tuple[int, int]]) -> None:
        """Keep the bytes of `spans`, first byte and number, alone and in their order."""
        ordered = partial_of(self._file)
        with self._partial.open("rb") as old, ordered.open("wb") as new:
            for start, num_bytes in spans:
                old.seek(start)
                new.write(old.read(num_bytes))
        ordered.replace(self._partial)
        self._crc = self._num_read = 0

    def persist(self) -> None:
        """Store for good what was written so far, so that less is left for `close` and `checksum`."""
        if self._num_written - self._num_read >= PERSISTED_BYTES:  # another thread may be about to write the first
            sync(self._partial)
            self._read_back(self._partial)

    def close(self) -> None:
        sync(self._partial)
        self._partial.replace(self._file)
        sync(self._file.parent)

    def abort(self) -> None:
        """Delete what was written; nothing where the file is closed."""
        self._partial.unlink(missing_ok=True)

    def remove(self) -> None:
        """Delete what was written, and the file that is in its place."""
        self.abort()
        self._file.unlink(missing_ok=True)

    def checksum(self) -> int:
        """Return the CRC-32C of the closed file, which is read back; a bucket's server checked what it got."""
        self._read_back(self._file)
        return self._crc

    def _read_back(self, path: Path) -> None:
        """Add to the checksum the bytes of `path` that are not in it yet."""
        import google_crc32c

        with path.open("rb") as file:
            file.seek(self._num_read)
            while piece := file.read(PIECE_BYTES):
                self._crc = google_crc32c.extend(self._crc, piece)
                self._num_read += len(piece)


class GrowingUpload:
    """A file in a bucket: parts of it go there while it grows, PARTS_AT_ONCE at a time; a small one goes at once."""

    def __init__(self, file: Remote, most_bytes: int) -> None:
        object_store.check_writable(file)
        self._file, self._part_bytes = file, part_bytes(most_bytes)
        self._upload: WritableFile | None = None
        self._crc = 0

    def write(self, pieces: Sequence[bytes]) -> None:
        import google_crc32c

        if self._upload is None:
            self._upload = object_store.open_upload(self._file, self._part_bytes, PARTS_AT_ONCE)
        with object_store.explaining(self._file):
            for piece in pieces:
                self._upload.write(piece)
                self._crc = google_crc32c.extend(self._crc, piece)

    def settle(self) -> None:
        if self._upload is not None:
            with object_store.explaining(self._file):
                self._upload.flush()

    def persist(self) -> None:
        """Do nothing: parts are on their way, and the bucket says when they have arrived."""

    def close(self) -> None:
        assert self._upload is not None
        upload, self._upload = self._upload, None
        with object_store.explaining(self._file):
            upload.close()

    def abort(self) -> None:
        if self._upload is not None:
            upload, self._upload = self._upload, None
            with object_store.explaining(self._file):
                upload.__exit__(RuntimeError, None, None)  # its only way to give up

    def remove(self) -> None:
        self.abort()
        object_store.delete_file(self._file)

    def checksum(self) -> int:
        return self._crc


def part_bytes(most_bytes: int) -> int:
    """Return the bytes of each part of an upload of `most_bytes`."""
    return max(PART_BYTES, -(-most_bytes // (MOST_PARTS - 1)))


def upload_bytes(most_bytes: int, num_files: int = 1) -> int:
    """Return the bytes in memory of `num_files` uploads, each of `most_bytes`, of which one has parts on their way."""
    return part_bytes(most_bytes) * (PARTS_AT_ONCE + num_files)


Growing = GrowingFile | GrowingUpload


def open_growing(file: Location, most_bytes: int) -> Growing:
    """Return a new file that will take the place of `file`, of `most_bytes` at most."""
    return GrowingUpload(file, most_bytes) if isinstance(file, Remote) else GrowingFile(file)
