"""Find shared pages by the tokens that they hold (prefix caching).

A *block* is one page per group, for P consecutive tokens from a multiple of P on. Its name is a
hash of its tokens and of the previous block's name, so blocks of one name hold the same entries:
those of the same tokens after the same prefix, in one pool.
"""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from weakref import WeakValueDictionary

from kvfold.cache.sharing import SharedPages, SharingPool

BYTES = 16  # length of a name, long enough that hashes do not collide


class Names:
    """Names of a sequence's blocks, each computed once. Sequences with different salts share no
    blocks."""

    def __init__(self, page: int, salt: str = "") -> None:
        self.page, self._names = page, [blake2b(salt.encode(), digest_size=BYTES).digest()]

    def of(self, tokens: Sequence[int], start: int, stop: int) -> list[bytes]:
        """Names of blocks start..stop of a sequence, which must begin with the tokens of all
        earlier calls."""
        for number in range(len(self._names) - 1, stop):
            block = array("q", tokens[number * self.page : (number + 1) * self.page])
            digest = blake2b(block.tobytes(), key=self._names[-1], digest_size=BYTES)
            self._names.append(digest.digest())
        return self._names[start + 1 : stop + 1]


class PrefixIndex:
    """Shared blocks by name. The pool alone decides which blocks are dropped."""

    def __init__(self, pool: SharingPool) -> None:
        self.pool = pool
        self._blocks: WeakValueDictionary[bytes, SharedPages] = WeakValueDictionary()

    def get(self, name: bytes) -> SharedPages | None:
        block = self._blocks.get(name)
        return block if block is not None and self.pool.has(block) else None

    def chain(self, names: Sequence[bytes]) -> list[SharedPages]:
        """The cached blocks of these names, up to the first that is missing."""
        return list(self._known(names))

    def _known(self, names: Sequence[bytes]) -> Iterator[SharedPages]:
        for name in names:
            if (block := self.get(name)) is None:
                return
            yield block

    def put(self, names: Sequence[bytes], blocks: Sequence[SharedPages]) -> None:
        self._blocks.update(zip(names, blocks, strict=False))

    def clear(self) -> None:
        self._blocks.clear()
