"""Reads a context once and continues it many times, for needle and tasks."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from kvfold.evaluation.perplexity import token_nll
from kvfold.evaluation.session import Footprint, Session, Sessions


class Reader:
    """A context in a session. Each continuation sees the context alone, not the earlier ones.

    agnostic: the context is compressed before the model sees a question. Otherwise context and
    question are one prompt, which is compressed after its first answer token, as in the engine.
    footprint: of the last prompt.
    """

    def __init__(self, sessions: Sessions, *, agnostic: bool = True) -> None:
        self.sessions, self.agnostic = sessions, agnostic
        self.session: Session | None = None
        self.context: list[int] = []
        self.footprint: Footprint | None = None

    def prefill(self, ids: list[int]) -> None:
        """Set the context. The session of the former one is closed, unless both are equal."""
        if self.session is not None and self.context == ids:
            return
        self.close()
        self.context = ids
        if self.agnostic:
            self._shared(())

    def _shared(self, question: Sequence[int]) -> Session | None:
        """Return the session that holds the context alone; None if `question` may not follow the
        compression, or the session cannot rewind."""
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
        """Give a session that holds context and `question`, and the logits [V] of the last token.
        Tokens that are fed to it are removed afterwards."""
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
        """Generate greedily after the context and `question`."""
        with self.branch(question) as (session, last):
            return session.greedy(last, num_tokens, stops)

    def log_likelihood(self, ending: Sequence[int]) -> float:
        """Compute the log-likelihood of `ending` after the context, in nats."""
        return self.likelihood(ending)[0]

    def likelihood(self, ending: Sequence[int]) -> tuple[float, bool]:
        """The log-likelihood of `ending` after the context, and whether greedy decoding gives
        it."""
        with self.branch() as (session, last):
            rest = session.chunks(torch.tensor([ending[:-1]], dtype=torch.long))
            logits = torch.cat([last[None, None], *rest], 1)
        is_greedy = logits[0].argmax(-1).tolist() == list(ending)
        return -float(token_nll(logits, torch.tensor([ending])).sum()), is_greedy

    def close(self) -> None:
        """Free the cache."""
        if self.session is not None:
            self.session.__exit__(None, None, None)
            self.session = None
