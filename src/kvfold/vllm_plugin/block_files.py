"""Blocks of a KV cache as files: whole and right, or not there.

A file holds one block of all layers of one process:

    MAGIC | length of the payload, 8 bytes | CRC-32 of key and payload, 4 bytes | payload

It is written under a scratch name and renamed, so a reader never sees half of it. What a crash of
the machine leaves behind fails the check of length or sum. This module imports neither torch nor
vLLM.
"""

import hashlib
import os
import secrets
import struct
import threading
import time
import zlib
from array import array
from collections.abc import Sequence
from pathlib import Path

from kvfold.vllm_plugin.log import logger

MAGIC = b"KVF1"
HEADER = struct.Struct("<4sQI")
SCRATCH = ".part-"
SCRATCH_SECONDS = 3600  # after which a scratch file belongs to a process that was killed
RETRY_SECONDS = 60.0  # without writes after one failed


class DamagedBlock(Exception):
    """A stored block is incomplete or was changed."""


def block_keys(
    tokens: Sequence[int], block_size: int, parents: Sequence[bytes] = (), salt: str | None = None
) -> list[bytes]:
    """Keys of the whole blocks of a sequence, 32 bytes each: equal only for equal tokens from the
    sequence's beginning on, and equal salts.

    tokens: of the whole sequence.
    parents: keys of its first blocks, if they are known; they are returned too.
    salt: `cache_salt` of a request.
    """
    keys = list(parents)
    parent = keys[-1] if keys else hashlib.sha256(b"" if salt is None else salt.encode()).digest()
    for start in range(len(keys) * block_size, len(tokens) - block_size + 1, block_size):
        numbers = array("q", tokens[start : start + block_size])
        parent = hashlib.sha256(parent + numbers.tobytes()).digest()
        keys.append(parent)
    return keys


class BlockFiles:
    """The blocks of one kind of cache in a folder.

    folder: of this kind alone (`fingerprint`).
    num_bytes: of a block's payload.
    rank: of the process whose part of the blocks these are.
    """

    def __init__(self, folder: Path, num_bytes: int, rank: int = 0) -> None:
        self.folder, self.num_bytes, self.rank = folder, num_bytes, rank
        self.paused_until = 0.0
        self.warned_of_writes = False
        self._lock = threading.Lock()

    def path(self, key: bytes) -> Path:
        name = key.hex()
        return self.folder / name[:2] / f"{name}.{self.rank}"

    def has(self, key: bytes) -> bool:
        """Whether a block is stored in full length; one that is not is removed, with a warning. The
        checksum is compared when a block is read."""
        path = self.path(key)
        try:
            size = os.stat(path).st_size
        except OSError:
            return False
        if size == HEADER.size + self.num_bytes:
            return True
        logger.warning(
            "kvfold: a stored block is damaged and computed again: %s has %d bytes, not %d",
            path, size, HEADER.size + self.num_bytes,
        )  # fmt: skip
        self.remove(key)
        return False

    def read(self, key: bytes, payload: memoryview) -> None:
        """Read a block into `payload`.

        Raises OSError if it cannot be read, and DamagedBlock if it is not what was written.
        """
        path, header = self.path(key), bytearray(HEADER.size)
        descriptor = os.open(path, os.O_RDONLY)
        try:  # few calls: each may wait for the engine's thread, which holds Python's lock
            count = os.readv(descriptor, [header, payload])
            while more := os.readv(descriptor, [payload[max(count - len(header), 0) :]]):
                count += more
        finally:
            os.close(descriptor)
        if count < len(header) + len(payload):
            raise DamagedBlock(f"{path} ends after {count} bytes")
        magic, length, checksum = HEADER.unpack(header)
        if magic != MAGIC or length != len(payload):
            raise DamagedBlock(f"{path} is no block of {len(payload)} bytes")
        if zlib.crc32(payload, zlib.crc32(key)) != checksum:
            raise DamagedBlock(f"the checksum of {path} is wrong")

    def write(self, key: bytes, payload: memoryview) -> bool:
        """Store a block, unless it is stored already. Returns whether it is stored now.

        After a failed write, such as to a full disk, nothing is written for a minute. The log has
        one warning.
        """
        assert len(payload) == self.num_bytes, f"{len(payload)} bytes of {self.num_bytes}"
        if self.has(key):
            return True
        if not self.can_write():
            return False
        path = self.path(key)
        scratch = path.with_name(f"{SCRATCH}{secrets.token_hex(8)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(scratch, "xb", buffering=0) as file:
                checksum = zlib.crc32(payload, zlib.crc32(key))
                _write_all(file.fileno(), HEADER.pack(MAGIC, len(payload), checksum))
                _write_all(file.fileno(), payload)
            os.replace(scratch, path)
        except OSError as error:
            _unlink(scratch)
            self._pause(error)
            return False
        return True

    def can_write(self) -> bool:
        return time.monotonic() >= self.paused_until

    def remove(self, key: bytes) -> None:
        """Remove a damaged block, so that it is written again."""
        _unlink(self.path(key))

    def remove_scratch(self, older_than: float = SCRATCH_SECONDS) -> int:
        """Remove what killed processes left unfinished. Returns the number of files."""
        removed = 0
        for path in self.folder.glob(f"*/{SCRATCH}*"):
            try:
                if time.time() - path.stat().st_mtime >= older_than:
                    path.unlink()
                    removed += 1
            except OSError:
                continue  # another process was faster
        return removed

    def _pause(self, error: OSError) -> None:
        with self._lock:
            self.paused_until = time.monotonic() + RETRY_SECONDS
            if not self.warned_of_writes:
                self.warned_of_writes = True
                logger.warning(
                    "kvfold: cannot store blocks in %s: %s. Serving goes on without storing; it is"
                    " tried again every %d s, without another warning",
                    self.folder, error, RETRY_SECONDS,
                )  # fmt: skip


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all bytes; os.write may write fewer."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("kvfold: cannot remove %s: %s", path, error)
