"""What a caller hands in and that raises: the error comes out as it was, and nothing stays."""

from itertools import count

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import kvfold
from fuzz_cases import model_of
from kvfold import LLM, attach, compress, detach
from maps_users_cases import full_rank
from models import tiny, tokens

SIZE = {"page": 8, "kv_bytes": 2**22, "max_sequences": 2, "max_tokens": 256}


class Boom(RuntimeError):
    """The caller's."""


class Raises:
    """A progress callback whose nth call raises."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, *_: object) -> None:
        self.left -= 1
        if self.left < 0:
            raise Boom


def state(model) -> dict[str, object]:
    """All of a model that a failed call might leave changed."""
    hooks = [
        (name, len(x._forward_hooks), len(x._forward_pre_hooks), len(x._backward_hooks), type(x))
        for name, x in model.named_modules()
    ]
    weights = {name: x.detach().numpy().tobytes() for name, x in model.state_dict().items()}
    grads = [(name, x.requires_grad, x.grad) for name, x in model.named_parameters()]
    return {"hooks": hooks, "weights": weights, "grads": grads, "training": model.training}


@pytest.mark.parametrize("fold", [True, False], ids=["fold", "maps"])
def test_progress_that_raises_leaves_the_model_and_no_file(fold, tmp_path, monkeypatch) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The ship went out to sea, and nobody saw it again. " * 400)
    tokenizer = kvfold.hub.loading.load_tokenizer("reference:gqa")
    config = kvfold.hub.loading.load_config("reference:gqa")
    config.num_hidden_layers, config.layer_types = 2, None
    torch.manual_seed(0)
    model = kvfold.hub.loading.AutoModelForCausalLM.from_config(config).float().eval()
    before, out, calls = state(model), tmp_path / "out", 0
    for calls in range(0, 400, 29):
        try:
            compress(
                model,
                "swift",
                fold=fold,
                factor=4,
                calib=[text],
                max_tokens=4096,
                tokenizer=tokenizer,
                output=out,
                check=False,
                progress=Raises(calls),
            )
        except Boom:
            assert state(model) == before, calls
            assert {x.name for x in tmp_path.iterdir()} == {"text.txt"}, calls
        else:
            break
    assert calls > 0 and out.exists()


def test_progress_that_raises_gives_pages_back() -> None:
    llm = LLM(model_of("llama-gqa", None), evict="kvzip", keep_tokens=1.0, **SIZE)
    ids = tokens(1, 120, seed=5)[0].tolist()
    free = llm.runner.pool.free_bytes
    for calls in count(step=17):
        try:
            llm.pack(ids, factor=5, progress=Raises(calls))
        except Boom:
            llm.runner.pool.check_integrity()
            assert llm.runner.pool.free_bytes == free
        else:
            break
    assert calls > 1
    packed = llm.pack(ids, factor=5)
    other = LLM(model_of("llama-gqa", None), evict="kvzip", keep_tokens=1.0, **SIZE)
    assert [x.tolist() for x in packed.pages] == [
        x.tolist() for x in other.pack(ids, factor=5).pages
    ]


class Streamer(BaseStreamer):
    def __init__(self) -> None:
        self.raises = Raises(3)

    def put(self, value: object) -> None:
        self.raises()

    def end(self) -> None:
        pass


class Processor(LogitsProcessor):
    def __init__(self) -> None:
        self.raises = Raises(3)

    def __call__(self, input_ids: object, scores: torch.Tensor) -> torch.Tensor:
        self.raises()
        return scores


class Criteria(StoppingCriteria):
    def __init__(self) -> None:
        self.raises = Raises(3)

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        self.raises()
        return torch.zeros(len(input_ids), dtype=torch.bool)


HANDED_IN = {
    "streamer": lambda: {"streamer": Streamer()},
    "logits_processor": lambda: {"logits_processor": [Processor()]},
    "stopping_criteria": lambda: {"stopping_criteria": [Criteria()]},
}


@pytest.mark.parametrize("name", HANDED_IN)
@pytest.mark.parametrize("way", ["folded", "attached"])
def test_generate_goes_on_after_what_it_was_handed_raised(name, way) -> None:
    model = model_of("llama-gqa", "small") if way == "folded" else tiny("llama-gqa")
    if way == "attached":
        attach(model, full_rank(model))
    ids = tokens(1, 12, seed=2)
    how = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **how)
    with pytest.raises(Boom):
        model.generate(ids, **how, **HANDED_IN[name]())
    assert torch.equal(model.generate(ids, **how), expected)
    if way == "attached":
        detach(model)
