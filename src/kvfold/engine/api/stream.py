"""Streams of outputs, in which token ids become text."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from kvfold.engine.api.detokenizer import Decode, Detokenizer, StopStrings
from kvfold.engine.core.engine import Engine
from kvfold.engine.requests.request import Request, SamplingParams, StepOutput


class OutputDecoder:
    """Decodes one request's outputs to text, as they come or at its end.

    decode: token ids to text; None: no text. stops: the compiled stop strings of `params`, which
        several requests may share. whole: decode all outputs at once when the request ends.
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
        self._pending_ids: list[int] = []

    def decode_output(self, output: StepOutput) -> StepOutput:
        """The output with its text. A stop string or a failing detokenizer ends the request."""
        if self.detokenizer is None:
            return output
        ended = output.finish_reason  # "stop" from the engine means a stop token
        hidden = ended == "stop" or (ended == "eos" and self.params.skip_special_tokens)
        self._pending_ids += output.token_ids[:-1] if hidden else output.token_ids
        if self.at_end and output.finish_reason is None:
            return output
        ids, self._pending_ids = self._pending_ids, []
        try:
            used = self.detokenizer.push(ids)
            output = output if used is None else _stopped(output, used)
            text = self.detokenizer.take(last=output.finish_reason is not None)
        except Exception as error:  # the tokenizer's, whatever it may be
            why = f"its tokens could not be decoded: {type(error).__name__}: {error}"
            return replace(output, finish_reason="error", error=why)
        return replace(output, text=text)


def _stopped(output: StepOutput, used: int) -> StepOutput:
    """The output up to the token that completed a stop string."""
    ids, logprobs = output.token_ids[:used], output.logprobs and output.logprobs[:used]
    return replace(output, token_ids=ids, logprobs=logprobs, finish_reason="stop")


class OutputReader:
    """Decodes the outputs of several requests. Subclasses wait for outputs.

    cancel: ends a request. `close` cancels all requests that have not ended; so does losing the
        last reference.
    """

    def __init__(self, cancel: Callable[[int], object]) -> None:
        self._cancel = cancel
        self._decoders: dict[int, OutputDecoder] = {}

    def close(self) -> None:
        """Cancel the requests that have not ended."""
        for id in tuple(self._decoders):
            self._cancel(id)
        self._decoders.clear()

    def _decode(self, output: StepOutput) -> StepOutput | None:
        """The output with its text; None for a request that has ended at a stop string."""
        if (decoder := self._decoders.get(output.id)) is None:
            return None
        output = decoder.decode_output(output)
        if output.finish_reason is not None:
            self._decoders.pop(output.id, None)  # another thread may have closed this
            self._cancel(output.id)
        return output

    def __del__(self) -> None:
        self.close()


class Stream(OutputReader, Iterator[StepOutput]):
    """The outputs of requests of one engine, as they come.

    Reading runs the engine's steps, unless another thread does. Leaving a `with` block closes the
    stream.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.cancel)
        self._engine = engine
        self._box: deque[StepOutput] = deque()

    def submit(self, requests: Sequence[tuple[Request, OutputDecoder]]) -> "Stream":
        """Submit requests. Returns the stream."""
        self._decoders |= {request.id: decoder for request, decoder in requests}
        for request, _ in requests:
            self._engine.submit(request, self._box.append)
        return self

    def __next__(self) -> StepOutput:
        while self._decoders:
            while not self._box:
                self._engine.step_or_wait(self._box)
            if (output := self._decode(self._box.popleft())) is not None:
                return output
        raise StopIteration

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
