"""A context read once and continued many times: what needle and tasks ask of a session."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from kvfold.evaluation.perplexity import token_nll
from kvfold.evaluation.session import Footprint, Session, Sessions


class Reader:
    """Every continuation of a context is as if it were the first.

    agnostic: the context is compressed before a question is seen. Otherwise context and question
    are one prompt, compressed once its first answer token is out, as the engine does. `footprint`:
    of the last prompt that was read.
    """

    def __init__(self, sessions: Sessions, *, agnostic: bool = True) -> None:
        self.sessions, self.agnostic = sessions, agnostic
        self.session: Session | None = None
        self.context: list[int] = []
        self.footprint: Footprint | None = None

    def prefill(self, ids: list[int]) -> None:
        """Read a context; the one before it is forgotten, or is this one and still there."""
        if self.session is not None and self.context == ids:
            return
        self.close()
        self.context = ids
        if self.agnostic:
            self._shared(())

    def _shared(self, question: Sequence[int]) -> Session | None:
        """The session that holds the context alone, where `question` may follow its compression."""
        session = self.session or self.sessions()
        if not session.can_rewind or (question and session.evicts and not self.agnostic):
            return None
        if self.session is None:
            self.session = session.__enter__()
            self.last = self._read(session, self.context)
        return self.session

    def _read(self, session: Session, prompt: list[int]) -> Tensor:
        last = session.read(prompt, prompt=len(prompt))
        session.compress()
        self.footprint = session.footprint()
        return last

    @contextmanager
    def branch(self, question: Sequence[int] = ()) -> Iterator[tuple[Session, Tensor]]:
        """A session that holds the context and `question`, and the logits [V] of their last token.

        What is fed to it is forgotten afterwards.
        """
        shared = self._shared(question)
        if shared is None:
            self.close()
            with self.sessions() as session:
                yield session, self._read(session, [*self.context, *question])
        else:
            mark = shared.mark()
            yield shared, shared.read(question) if question else self.last
            shared.rewind(mark)

    def answer(
        self, question: Sequence[int], num_tokens: int, stops: Collection[int | None] = ()
    ) -> list[int]:
        """Greedy continuation of the context and `question`."""
        with self.branch(question) as (session, last):
            return session.greedy(last, num_tokens, stops)

    def log_likelihood(self, ending: Sequence[int]) -> float:
        """Of all of `ending` after the context, in nats."""
        with self.branch() as (session, last):
            rest = session.chunks(torch.tensor([ending[:-1]], dtype=torch.long))
            logits = torch.cat([last[None, None], *rest], 1)
        return -float(token_nll(logits, torch.tensor([ending])).sum())

    def close(self) -> None:
        """Free the cache."""
        if self.session is not None:
            self.session.__exit__(None, None, None)
            self.session = None
