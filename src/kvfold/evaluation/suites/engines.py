"""The engines that answer a suite, kvfold's and vLLM's. Both get the same token ids."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvfold.engine.api.llm import LLM, completion_of
from kvfold.engine.api.stream import OutputDecoder, Stream
from kvfold.engine.requests.request import CacheParams, Request, SamplingParams, StepOutput
from kvfold.evaluation.suites.prompts import Prompt
from kvfold.utils.progress import Report


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A greedy answer. error: why the request failed; None if it did not."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str = "error"
    error: str | None = None


class Answering(Protocol):
    """An engine that serves a model. tokenizer: of transformers."""

    name: str
    tokenizer: Any

    def answer(self, prompts: Sequence[Prompt], report: Report | None = None) -> list[Reply]:
        """Answer prompts; the replies are in their order. A request that fails has an error in its
        reply, and does not stop the others."""
        ...


class ByKVFold:
    """Answers with a `kvfold.LLM`.

    question_after: read the question of a prompt after its context was evicted to the budget, as
        kvpress does; else the whole prompt is evicted once it is read.
    """

    name = "kvfold"

    def __init__(self, llm: LLM, *, question_after: bool = False) -> None:
        self.llm, self.tokenizer = llm, llm.tokenizer
        runner = llm.runner
        self.splits = question_after and (runner.policy is not None or runner.demotes)

    def answer(self, prompts: Sequence[Prompt], report: Report | None = None) -> list[Reply]:
        if report is not None:
            report(0, len(prompts))  # time that is left is estimated from here on
        replies: list[Reply | None] = [None] * len(prompts)
        places, submitted = {}, []
        for place, prompt in enumerate(prompts):
            try:
                submitted.append(self._request(prompt))
            except ValueError as error:
                replies[place] = Reply(error=str(error))
            else:
                places[submitted[-1][0].id] = place
        outputs: dict[int, list[StepOutput]] = {id: [] for id in places}
        ended = len(prompts) - len(submitted)
        with Stream(self.llm.engine).submit(submitted) as stream:
            for output in stream:
                outputs[output.id].append(output)
                if output.finish_reason is None:
                    continue
                replies[places[output.id]] = _reply_of(outputs.pop(output.id))
                ended += 1
                if report is not None:
                    report(ended, len(prompts))
        return [reply for reply in replies if reply is not None]

    def _request(self, prompt: Prompt) -> tuple[Request, OutputDecoder]:
        sampling = SamplingParams(max_new_tokens=prompt.max_new_tokens, stop=prompt.stop)
        cache = CacheParams(compress_after=prompt.context or None) if self.splits else None
        return self.llm.request(list(prompt.ids), sampling, cache, whole=True)


def _reply_of(outputs: list[StepOutput]) -> Reply:
    completion = completion_of(outputs)
    error = completion.error
    if completion.finish_reason in ("error", "pool", "cancelled"):
        error = error or f"ended for {completion.finish_reason}"
    return Reply(
        text=completion.text,
        token_ids=completion.token_ids,
        finish_reason=completion.finish_reason,
        error=error,
    )


class ByVLLM:
    """Answers with a `vllm.LLM`."""

    name = "vllm"

    def __init__(self, llm: Any, tokenizer: Any) -> None:
        self.llm, self.tokenizer = llm, tokenizer
        self.max_tokens = llm.llm_engine.vllm_config.model_config.max_model_len

    def answer(self, prompts: Sequence[Prompt], report: Report | None = None) -> list[Reply]:
        import vllm

        longest = self.max_tokens - 1  # vLLM refuses all prompts if one is too long
        fitting = [x for x in prompts if len(x.ids) <= longest]
        ids = [{"prompt_token_ids": list(x.ids)} for x in fitting]
        sampling = [
            vllm.SamplingParams(temperature=0, max_tokens=x.max_new_tokens, stop=list(x.stop))
            for x in fitting
        ]
        if report is not None:
            report(0, len(prompts))
        outputs = self.llm.generate(ids, sampling, use_tqdm=sys.stderr.isatty())
        replies = iter([self._reply(x.outputs[0]) for x in outputs])
        why = f"the prompt has more tokens than the {longest} that vLLM takes"
        if report is not None:
            report(len(prompts), len(prompts))
        return [next(replies) if len(x.ids) <= longest else Reply(error=why) for x in prompts]

    @staticmethod
    def _reply(output: Any) -> Reply:
        reason = str(output.finish_reason)
        return Reply(
            text=output.text,
            token_ids=tuple(output.token_ids),
            finish_reason=reason,
            error=None if reason in ("stop", "length") else f"ended for {reason}",
        )
