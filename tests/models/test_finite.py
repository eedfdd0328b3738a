"""Numbers that are not finite, and answers unlike the original's, are seen: when a model is
compressed, and before an engine serves it."""

from pathlib import Path

import pytest
import torch

import kvfold
from commands import refused
from kvfold import LLM, recipes
from kvfold.calibration.calibrate import calibrate
from kvfold.compression.compressor import Compressor
from kvfold.config import CacheConfig
from kvfold.engine.runner import trial
from kvfold.engine.runner.build import build_runner
from kvfold.evaluation import answers
from kvfold.evaluation.answers import ReferenceAnswer, check_answer
from kvfold.hub.checkpoint import mark
from kvfold.layout.pages import plain_spec
from kvfold.models.families import family_of
from kvfold.models.finite import check_outputs, probe_ids, rows_are_finite
from kvfold.models.fold import fold_plain
from kvfold.models.weights import rounded
from models import CONFIGS, tiny, tokens
from steps import broken

REFERENCE = ("KVFOLD_BACKEND", "reference")
STORED = [{}, {"bits": 4}, {"bits": 4, "format": "kivi"}, {"evict": "snapkv", "keep_tokens": 0.5}]


def overflowing(layer: int, part: str = "attention") -> torch.nn.Module:
    """In fp16, by its own weights, which are finite."""
    model = tiny("llama-gqa")
    own = model.model.layers[layer]
    weight = own.self_attn.v_proj.weight if part == "attention" else own.mlp.up_proj.weight
    with torch.no_grad():
        weight.mul_(2e5).clamp_(-6e4, 6e4)
    return model.half()


@pytest.mark.parametrize(
    ("layer", "part", "named"),
    [
        (0, "attention", "the attention of layer 0 gives"),
        (1, "attention", "the attention of layer 1 gives"),
        (1, "mlp", "layer 1, behind its attention, gives"),
    ],
)
def test_a_model_that_overflows_is_refused_by_the_layers_name(layer, part, named) -> None:
    model = overflowing(layer, part)
    with pytest.raises(ValueError, match=named):
        check_outputs(model)
    with pytest.raises(ValueError, match="load it with dtype float32"):
        Compressor(model, recipes.get("lorc"))
    with pytest.raises(ValueError, match=f"{named} .* as tokens are decoded through the cache"):
        LLM(model)
    check_outputs(model.float())


@pytest.mark.parametrize("name", CONFIGS)
def test_models_of_all_families_pass(name: str) -> None:
    check_outputs(tiny(name))


def test_a_row_may_have_tokens_that_never_come() -> None:
    inf, nan = torch.inf, torch.nan
    rows = torch.tensor([[0.0, -inf], [nan, 1.0], [-inf, -inf], [inf, 0.0], [-inf, nan]])
    assert rows_are_finite(rows).tolist() == [True, False, False, False, False]


def test_weights_that_are_no_numbers_are_named_at_an_engines_start() -> None:
    model = tiny("llama-gqa")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"parameter model\.layers\.1\.mlp\.up_proj\.weight holds"):
        LLM(model)


@pytest.mark.parametrize("settings", STORED, ids=str)
@pytest.mark.parametrize("name", ["llama-gqa", "mistral-sliding", "opt"])
def test_an_engine_starts_with_an_empty_pool(name: str, settings: dict) -> None:
    if name == "mistral-sliding" and settings.keys() & {"evict", "format"}:
        pytest.skip("a sliding window drops tokens by itself")
    llm = LLM(tiny(name), max_tokens=64, kv_bytes=2**18, **settings)
    pool = llm.runner.pool
    pool.check_integrity()
    stats = pool.stats()
    assert not pool.open_slots and stats.used_bytes == stats.high_water_bytes == 0


def test_an_engine_names_the_layer_whose_kernel_fails(monkeypatch) -> None:
    monkeypatch.setenv(*REFERENCE)
    broken(monkeypatch, layer=1, rows=trial.SHORT[0] + 1)
    with pytest.raises(ValueError, match=r"^the attention of layer 1 gives numbers"):
        LLM(tiny("llama-gqa"))


def test_a_pool_without_room_is_not_tried(monkeypatch) -> None:
    model = tiny("llama-gqa")
    runner = build_runner(model, CacheConfig(), num_slots=1, max_tokens=4)
    monkeypatch.setattr(trial, "run_tokens", lambda *_: pytest.fail("there is no room"))
    trial.check_start(runner)


@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize("settings", STORED[:3], ids=str)
def test_compiling_ahead_leaves_no_trace(settings: dict, kernels: str, monkeypatch) -> None:
    """A dry run, of kernels that do not run where they are Triton's, changes no logits."""
    monkeypatch.setenv("KVFOLD_BACKEND", kernels)
    ids = tokens(1, 9)[0].tolist()
    logits = []
    for ahead in (False, True):
        runner = build_runner(
            tiny("llama-gqa"), CacheConfig(**settings), num_slots=2, max_tokens=64
        )
        if ahead:
            trial.compile_kernels(runner)
        assert not runner.pool.open_slots
        logits.append(torch.stack([x[0] for x in trial.run_tokens(runner, [ids], [ids[:2]])]))
    assert torch.equal(*logits)


@pytest.mark.parametrize("settings", STORED[:3], ids=str)
def test_tokens_that_are_fed_are_those_of_requests(settings: dict) -> None:
    """Two sequences of other lengths, a step at a time, against each alone."""
    model = tiny("llama-gqa")
    runner = build_runner(model, CacheConfig(**settings), num_slots=2, max_tokens=64)
    prompts, rest = tokens(1, 9)[0].tolist(), tokens(2, 3).tolist()
    both = [x.clone() for x in trial.run_tokens(runner, [prompts, prompts[:4]], rest)]
    assert len(both) == 4 and both[0].shape == (2, 97)
    for i, prompt in enumerate((prompts, prompts[:4])):
        alone = [x[0] for x in trial.run_tokens(runner, [prompt], [rest[i]])]
        torch.testing.assert_close(torch.stack(both)[:, i], torch.stack(alone))
    if not settings:
        ids = torch.tensor([prompts + rest[0]])
        want = model(ids).logits[0, -4:]
        torch.testing.assert_close(torch.stack(both)[:, 0], want, atol=1e-4, rtol=1e-4)
    assert not runner.pool.open_slots
    next(steps := trial.run_tokens(runner, [prompts], [rest[0]]))
    steps.close()
    assert not runner.pool.open_slots


def test_probe_ids_are_tokens_of_the_model() -> None:
    assert max(probe_ids(20, 50)) < 20 and len(set(probe_ids(50000, 100))) == 100


# -- compressing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_that_keeps_all_answers_as_before(name: str) -> None:
    model = tiny(name)
    answer = ReferenceAnswer.of(model, None)
    assert len(answer.tokens) == answers.FEW
    spec = plain_spec(family_of(model.config).geometry(model.config))
    fold_plain(model, spec)
    mark(model, spec, {})
    before = {name: x.clone() for name, x in model.state_dict().items()}
    assert abs(check_answer(model, answer, 0.0)) < 1e-5
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_the_answer_is_the_originals_greedy_one() -> None:
    model = kvfold.reference("gqa")
    answer = ReferenceAnswer.of(model, kvfold.hub.loading.load_tokenizer("reference:gqa"))
    ids = torch.tensor([answer.prompt])
    want = model.generate(ids, max_new_tokens=answers.FEW, do_sample=False, pad_token_id=0)
    assert want[0, len(answer.prompt) :].tolist() == list(answer.tokens)
    assert answer.logits.argmax(-1).tolist() == list(answer.tokens)


def damage(monkeypatch, factor: float) -> None:
    """Value maps of every model that is folded from here on come out too large."""
    fold = Compressor.prepare

    def prepare(self, *args):
        prepared = fold(self, *args)
        for candidate in prepared.candidates:
            candidate.basis.up.mul_(factor)
        return prepared

    monkeypatch.setattr(Compressor, "prepare", prepare)


@pytest.mark.parametrize("recipe", ["fast", "lorc"])
def test_a_fold_that_went_wrong_is_not_saved(recipe: str, tmp_path: Path, monkeypatch) -> None:
    """By what a plan predicts, or what transformers computes where nothing predicts it."""

    def compress(**options) -> None:
        model = tiny("llama-gqa")
        wanted = Compressor(model, recipes.get(recipe)).needs
        given = {"statistics": calibrate(model, family_of(model.config), tokens(8, 64), wanted)}
        kvfold.compress(
            model, recipe, keep=1.0, output=tmp_path / "new", **given, **options, fold=True
        )

    monkeypatch.setattr(answers, "_dense", lambda model, answer: answer.logits)
    damage(monkeypatch, 4.0)
    with pytest.raises(
        ValueError, match=r"nats a token over 8 tokens, where .* explain 0\.25 at most;"
    ):
        compress()
    assert not list(tmp_path.iterdir())
    compress(check=False)
    assert (tmp_path / "new" / "model.safetensors").exists()


def test_a_prediction_that_is_too_high_hides_no_kernel(monkeypatch) -> None:
    monkeypatch.setenv(*REFERENCE)
    model = tiny("llama-gqa")
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # tokens that are sure of themselves
    answer = ReferenceAnswer.of(model, None)
    spec = plain_spec(family_of(model.config).geometry(model.config))
    fold_plain(model, spec)
    mark(model, spec, {})
    broken(monkeypatch, layer=0, rows=answers.PROMPT + 1, factor=100.0)
    with pytest.raises(ValueError, match=r"explain 1\.25 at most"):
        check_answer(model, answer, predicted=100.0)


def test_the_command_says_how_to_save_it_all_the_same(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(answers, "_dense", lambda model, answer: answer.logits)
    damage(monkeypatch, 4.0)
    command = [
        "compress",
        "reference:gqa",
        "--fold",
        "--recipe",
        "lorc",
        "--output",
        str(tmp_path / "new"),
    ]
    line = refused(capsys, *command)
    assert line.endswith("another recipe or another dtype; --set no-check saves it all the same")
    assert not list(tmp_path.iterdir())
    assert kvfold.cli.main.main([*command, "--no-check"]) == 0
    assert (tmp_path / "new" / "config.json").exists()


def test_an_answer_that_is_not_finite_names_the_layer(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv(*REFERENCE)
    broken(monkeypatch, layer=1, rows=answers.PROMPT + 3)
    place = {"output": tmp_path / "new", "device": "cpu"}
    with pytest.raises(ValueError, match=r"^nothing was saved, .*: the attention of layer 1 gives"):
        kvfold.compress("reference:gqa", "lorc", **place, fold=True)
    assert not list(tmp_path.iterdir())


def test_a_model_that_overflows_as_it_is_to_be_stored() -> None:
    """It was loaded in float32, as on a CPU."""
    model = overflowing(1).float()
    before = model.dtype
    with pytest.raises(ValueError, match=r"the attention of layer 1 gives .* in float16"):
        ReferenceAnswer.of(model, None, torch.float16)
    assert model.dtype is before
    ReferenceAnswer.of(model, None)


def test_rounding_is_undone() -> None:
    model = tiny("llama-gqa")
    before = [x.data_ptr() for x in model.parameters()]
    with rounded(model, torch.bfloat16):
        assert model.dtype is torch.bfloat16
    assert [x.data_ptr() for x in model.parameters()] == before
