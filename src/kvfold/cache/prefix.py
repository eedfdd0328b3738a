"""Which shared pages hold which tokens.

A *block* is P tokens from a multiple of P on, and its pages, one of every group. Its name is a
digest of its tokens and of the name of the block before it, so that blocks of one name hold the
same rows: those of the same tokens behind the same tokens, in one pool.
"""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from weakref import WeakValueDictionary

from kvfold.cache.sharing import SharedPages, SharingPool

BYTES = 16  # of a name: two that differ are as good as impossible to find alike


class Names:
    """Names of a sequence's blocks, each computed once. salt: sequences of another share none."""

    def __init__(self, page: int, salt: str = "") -> None:
        self.page, self._found = page, [blake2b(salt.encode(), digest_size=BYTES).digest()]

    def of(self, tokens: Sequence[int], start: int, stop: int) -> list[bytes]:
        """Blocks start..stop of a sequence that begins as in all calls before."""
        for number in range(len(self._found) - 1, stop):
            own = array("q", tokens[number * self.page : (number + 1) * self.page])
            name = blake2b(own.tobytes(), key=self._found[-1], digest_size=BYTES)
            self._found.append(name.digest())
        return self._found[start + 1 : stop + 1]


class PrefixIndex:
    """Blocks by name, as long as the pool has them: it alone says what is dropped."""

    def __init__(self, pool: SharingPool) -> None:
        self.pool = pool
        self._blocks: WeakValueDictionary[bytes, SharedPages] = WeakValueDictionary()

    def get(self, name: bytes) -> SharedPages | None:
        found = self._blocks.get(name)
        return found if found is not None and self.pool.has(found) else None

    def chain(self, names: Sequence[bytes]) -> list[SharedPages]:
        """The blocks that are there, up to the first that is not."""
        return list(self._known(names))

    def _known(self, names: Sequence[bytes]) -> Iterator[SharedPages]:
        for name in names:
            if (found := self.get(name)) is None:
                return
            yield found

    def put(self, names: Sequence[bytes], blocks: Sequence[SharedPages]) -> None:
        self._blocks.update(zip(names, blocks, strict=False))

    def clear(self) -> None:
        self._blocks.clear()
