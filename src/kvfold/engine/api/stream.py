"""Outputs of requests on their way to who reads them, where tokens become text."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from kvfold.engine.api.detokenizer import Decode, Detokenizer, StopStrings
from kvfold.engine.core.engine import Engine
from kvfold.engine.requests.request import Request, SamplingParams, StepOutput


class Answer:
    """One request's text as its tokens come in, or, if nobody reads it before, at its end.

    decode: None for no text. stops: those of `params`, where other answers have them too.
    """

    def __init__(
        self,
        decode: Decode | None,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        whole: bool,
        stops: StopStrings | None = None,
    ) -> None:
        self.params, self.at_end = params, whole and not params.stop
        self.detokenizer = Detokenizer(decode, prompt, stops or params.stop) if decode else None
        self._unread: list[int] = []

    def read(self, output: StepOutput) -> StepOutput:
        """The output with its text, cut where a stop string or a failing detokenizer ends it."""
        if self.detokenizer is None:
            return output
        ended = output.finish_reason  # "stop" from an engine is a token's
        hidden = ended == "stop" or (ended == "eos" and self.params.skip_special_tokens)
        self._unread += output.token_ids[:-1] if hidden else output.token_ids
        if self.at_end and output.finish_reason is None:
            return output
        ids, self._unread = self._unread, []
        try:
            used = self.detokenizer.push(ids)
            output = output if used is None else _stopped(output, used)
            text = self.detokenizer.take(last=output.finish_reason is not None)
        except Exception as error:  # the tokenizer's, whatever it may be
            why = f"no text of its tokens: {type(error).__name__}: {error}"
            return replace(output, finish_reason="error", error=why)
        return replace(output, text=text)


def _stopped(output: StepOutput, used: int) -> StepOutput:
    """Its first tokens, until a stop string was complete."""
    ids, logprobs = output.token_ids[:used], output.logprobs and output.logprobs[:used]
    return replace(output, token_ids=ids, logprobs=logprobs, finish_reason="stop")


class Reading:
    """Requests that somebody reads, to their ends. How to wait is for subclasses.

    cancel: ends one. Closing does that for all that have not ended, as does losing the last
    reference.
    """

    def __init__(self, cancel: Callable[[int], object]) -> None:
        self._cancel = cancel
        self._answers: dict[int, Answer] = {}

    def close(self) -> None:
        """End what has not ended; nothing more comes."""
        for id in tuple(self._answers):
            self._cancel(id)
        self._answers.clear()

    def _read(self, output: StepOutput) -> StepOutput | None:
        """An output with its text; None of a request that ended at a stop string, and came
        further."""
        if (answer := self._answers.get(output.id)) is None:
            return None
        output = answer.read(output)
        if output.finish_reason is not None:
            self._answers.pop(output.id, None)  # another thread may have closed this
            self._cancel(output.id)
        return output

    def __del__(self) -> None:
        self.close()


class Stream(Reading, Iterator[StepOutput]):
    """Outputs of requests of one engine, as they come, to their ends.

    Whoever reads takes the engine's next step where nothing is left to read, unless another thread
    is at it. Leaving a `with` block closes it.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.cancel)
        self._engine = engine
        self._box: deque[StepOutput] = deque()

    def open(self, requests: Sequence[tuple[Request, Answer]]) -> "Stream":
        """Submit requests."""
        self._answers |= {request.id: answer for request, answer in requests}
        for request, _ in requests:
            self._engine.submit(request, self._box.append)
        return self

    def __next__(self) -> StepOutput:
        while self._answers:
            while not self._box:
                self._engine.work(self._box)
            if (output := self._read(self._box.popleft())) is not None:
                return output
        raise StopIteration

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
