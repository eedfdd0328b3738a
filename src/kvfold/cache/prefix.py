"""Find shared pages by the tokens that they hold (prefix caching).

A *block* is one page per group, for P consecutive tokens from a multiple of P on. Its hash
covers its tokens and the hash of the previous block, so blocks of equal hash hold the same entries:
those of the same tokens after the same prefix, in one pool.
"""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from weakref import WeakValueDictionary

from kvfold.cache.sharing import CachedPages, SharingPool

BYTES = 16  # length of a hash, long enough that hashes do not collide


class BlockHasher:
    """Compute the hashes of a sequence's blocks, each once. Sequences with different salts share
    no blocks."""

    def __init__(self, page: int, salt: str = "") -> None:
        self.page, self._hashes = page, [blake2b(salt.encode(), digest_size=BYTES).digest()]

    def hashes(self, tokens: Sequence[int], start: int, stop: int) -> list[bytes]:
        """Hashes of blocks start..stop of a sequence, which must begin with the tokens of all
        earlier calls."""
        for number in range(len(self._hashes) - 1, stop):
            block = array("q", tokens[number * self.page : (number + 1) * self.page])
            digest = blake2b(block.tobytes(), key=self._hashes[-1], digest_size=BYTES)
            self._hashes.append(digest.digest())
        return self._hashes[start + 1 : stop + 1]


class PrefixIndex:
    """Cached blocks by hash. The pool alone decides which blocks are dropped."""

    def __init__(self, pool: SharingPool) -> None:
        self.pool = pool
        self._blocks: WeakValueDictionary[bytes, CachedPages] = WeakValueDictionary()

    def get(self, block_hash: bytes) -> CachedPages | None:
        block = self._blocks.get(block_hash)
        return block if block is not None and self.pool.has(block) else None

    def longest_match(self, hashes: Sequence[bytes]) -> list[CachedPages]:
        """The cached blocks of these hashes, up to the first that is missing."""
        return list(self._known(hashes))

    def _known(self, hashes: Sequence[bytes]) -> Iterator[CachedPages]:
        for block_hash in hashes:
            if (block := self.get(block_hash)) is None:
                return
            yield block

    def put(self, hashes: Sequence[bytes], blocks: Sequence[CachedPages]) -> None:
        self._blocks.update(zip(hashes, blocks, strict=False))

    def clear(self) -> None:
        self._blocks.clear()
