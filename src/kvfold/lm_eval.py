"""The model `kvfold` of EleutherAI's lm-evaluation-harness, which scores through the paged cache.

`python -m kvfold.lm_eval` is the harness's command `lm_eval` with this model. Releases after 0.4.13
find the model by its entry point, without this module's command.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import fields
from functools import cached_property, partial
from typing import Any

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, maybe_truncate, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from kvfold.engine.api.llm import LLM, Completion, RequestBuilder, completion_of
from kvfold.engine.api.stream import Stream
from kvfold.engine.requests.request import SamplingParams, StepOutput
from kvfold.evaluation.dense import inference
from kvfold.evaluation.paged import PagedSession
from kvfold.evaluation.reader import Reader
from kvfold.utils.chat import render_chat
from kvfold.utils.errors import SettingError
from kvfold.utils.tokens import encode, leading_tokens

logger = logging.getLogger(__name__)

LogLikelihood = tuple[float, bool]  # in nats, and whether greedy decoding gives these tokens
Pair = tuple[list[int], list[int]]  # tokens of a context and of what follows it


@register_model("kvfold")
class KVFoldLM(TemplateLM):
    """A model in kvfold's engine.

    pretrained: a model or a folder of maps, as `kvfold.LLM` takes it.
    max_length: longest sequence in tokens (default: the model's positions).
    max_gen_toks: most tokens of an answer, for tasks that do not say.
    device: as `kvfold.LLM` takes it. "cuda:0", lm-eval's default everywhere, means no device where
        there is no such GPU.
    batch_size: requests that run at once; "auto" for the default of `kvfold.LLM`. One by one,
        log-likelihoods are exactly those of `kvfold eval`.
    settings: all others of `kvfold.LLM`: bits, maps, evict, dtype, max_sequences and so on.

    Raises ValueError like `kvfold.LLM`.
    """

    def __init__(
        self,
        pretrained: str,
        *,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        device: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        if max_length is not None:
            settings["max_tokens"] = max_length
        if str(batch_size).isdecimal():
            settings.setdefault("max_sequences", int(batch_size))
        if device == "cuda:0" and not torch.cuda.is_available():
            device = None
        self.llm = LLM(pretrained, device=device, **settings)
        self.tokenizer, self.max_gen_toks = self.llm.tokenizer, max_gen_toks
        self.max_length = self.llm.runner.pool.max_tokens

    @property
    def evicts(self) -> bool:
        """Whether what follows a context is read after the context lost entries."""
        return self.llm.runner.policy is not None or self.llm.runner.demotes

    # -- text ---------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        token: int = self.tokenizer.eos_token_id
        return token

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context."""
        bos: int | None = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    @cached_property
    def _leading(self) -> list[int]:
        return leading_tokens(self.tokenizer)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Token ids of a text, with the tokens before it that the tokenizer adds, unless the text
        begins with them as a chat template writes them."""
        ids = encode(self.tokenizer, string)
        given_already = ids[: len(self._leading)] == self._leading
        return ids if add_special_tokens is False or given_already else [*self._leading, *ids]

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        continues = not add_generation_prompt
        return render_chat(self.tokenizer, chat_history, continue_final_message=continues)

    # -- log-likelihoods ----------------------------------------------------------------------

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[LogLikelihood]:
        pairs = [self._fitting(context, rest) for _, context, rest in requests]
        one_by_one = self.evicts or self.llm.runner.pool.num_slots == 1
        scores = self._after_contexts(pairs) if one_by_one else self._in_prompts(pairs)
        results: list[LogLikelihood] = [(0.0, True)] * len(pairs)
        for place, result in tqdm(scores, "loglikelihood", len(pairs), disable=disable_tqdm):
            results[place] = result
            if requests[place][0] is not None:
                self.cache_hook.add_partial("loglikelihood", requests[place][0], result)
        return results

    def _fitting(self, context: list[int], rest: list[int]) -> Pair:
        """Truncate a context on its left. A request has an output too."""
        room = self.max_length - 1 - len(rest)
        if room < 1:
            raise SettingError(
                f"`max_length`: an answer of {len(rest)} tokens leaves no context in"
                f" {self.max_length}"
            )
        if len(context) > room:
            logger.warning("a context of %d tokens is cut to its last %d", len(context), room)
        return context[-room:], rest

    def _in_prompts(self, pairs: Sequence[Pair]) -> Iterator[tuple[int, LogLikelihood]]:
        """Score contexts and what follows as prompts, which are read through the cache."""
        sampling = SamplingParams(max_new_tokens=1, prompt_logprobs=0)
        for place, completion in self._complete([(a + b, sampling) for a, b in pairs]):
            assert completion.prompt_logprobs is not None
            scored = completion.prompt_logprobs[len(pairs[place][0]) - 1 :]
            yield place, (sum(x.chosen for x in scored), all(x.rank == 1 for x in scored))

    def _after_contexts(self, pairs: Sequence[Pair]) -> Iterator[tuple[int, LogLikelihood]]:
        """Read and compress each context before what follows is read, as `kvfold eval` does."""
        engine, runner = self.llm.engine, self.llm.runner
        sessions = partial(PagedSession, runner, engine.scheduler.chunk)
        with engine.lock.hold(), inference(self.llm.model), closing(Reader(sessions)) as reader:
            for place, (context, rest) in enumerate(pairs):
                self.llm.request([*context, *rest], None, None)  # raises if it is not legal
                reader.prefill(context)
                yield place, reader.likelihood(rest)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihood of whole texts, in windows of `max_length`."""
        if self.evicts:
            raise SettingError(
                f"`evict={str(self.llm.cache.evict)!r}`: this task scores whole texts, of which"
                " nothing is read after an eviction: leave `evict` out, or use kvfold eval --text"
            )
        windows: list[tuple[None, list[int], list[int]]] = []
        texts: list[int] = []  # the request of each window
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            for window in get_rolling_token_windows(
                tokens, self.prefix_token_id, max_seq_len=self.max_length - 2, context_len=1
            ):
                windows.append((None, *make_disjoint_window(window)))
                texts.append(number)
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows, disable_tqdm)
        for number, (score, _) in zip(texts, scores, strict=True):
            totals[number] += score
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    # -- generation ---------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        texts = [""] * len(requests)
        answers = self._complete([self._generation(*request.args) for request in requests])
        for place, answer in tqdm(answers, "generate_until", len(texts), disable=disable_tqdm):
            texts[place] = answer.text
            self.cache_hook.add_partial("generate_until", requests[place].args, answer.text)
        return texts

    def _generation(
        self, context: str, settings: Mapping[str, Any]
    ) -> tuple[list[int], SamplingParams]:
        """The tokens and the sampling of a request with lm-eval's settings."""
        sampling: dict[str, Any] = {**normalize_gen_kwargs(dict(settings), self.max_gen_toks)}
        stop = [x for x in handle_stop_sequences(sampling.pop("until"), None) if x]
        most, samples = sampling.pop("max_gen_toks"), sampling.pop("do_sample")
        sampling = {"temperature": float(samples)} | sampling
        legal = [x.name for x in fields(SamplingParams)]
        if unknown := sorted(sampling.keys() - set(legal)):
            raise ValueError(f"unknown gen_kwargs: {', '.join(unknown)}; of kvfold: {legal}")
        prompt, _ = maybe_truncate(self.tok_encode(context), most, self.max_length)
        return prompt, SamplingParams(
            max_new_tokens=most, stop=tuple(stop), stop_token_ids=(self.eot_token_id,), **sampling
        )

    # -- the engine ---------------------------------------------------------------------------

    def _complete(
        self, prompts: Sequence[tuple[list[int], SamplingParams]]
    ) -> Iterator[tuple[int, Completion]]:
        """Run requests together. Yields the place of each and its completion as they end. Raises
        RuntimeError for one that fails."""
        builder = RequestBuilder(self.llm, None, whole=True)
        requests = builder.requests([(ids, sampling, None) for ids, sampling in prompts])
        places = {request.id: place for place, (request, _) in enumerate(requests)}
        outputs: dict[int, list[StepOutput]] = {id: [] for id in places}
        with Stream(self.llm.engine).submit(requests) as stream:
            del requests, builder  # they hold the log-probabilities of all prompts
            for output in stream:
                outputs[output.id].append(output)
                if output.finish_reason is None:
                    continue
                completion = completion_of(outputs.pop(output.id))
                if completion.finish_reason in ("error", "pool", "cancelled"):
                    why = completion.error or "kv_bytes is too small for this request"
                    raise RuntimeError(f"request {places[output.id]} failed: {why}")
                yield places[output.id], completion


if __name__ == "__main__":
    cli_evaluate()
