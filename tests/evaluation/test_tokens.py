"""Every way to token ids gives those of the model's own tokenizer: `tokenizer(text)`.

Five families, built small, saved and loaded as a checkpoint's tokenizer is. Some put BOS in front
of a text; others have a BOS token and leave it out.
"""

import string

import pytest
import torch
import transformers as hf
from tokenizers import pre_tokenizers, processors

from kvfold import LLM
from kvfold.calibration import text as calibration_text
from kvfold.cli import generate
from kvfold.evaluation import needle, ruler
from kvfold.evaluation.tasks import run
from kvfold.evaluation.tasks.base import Prompt
from kvfold.evaluation.tasks.choice import ChoiceTask
from kvfold.evaluation.tasks.generation import GenerationTask
from kvfold.evaluation.tasks.late_question import LateQuestionTask
from kvfold.hub.loading import load_tokenizer
from kvfold.utils.chat import encode_chat
from kvfold.utils.text import documents
from kvfold.utils.tokens import encode, encode_prompt, encode_start, leading_tokens, windows

TEXT = "The ship went out to sea; nobody saw it again. "
SIZE = 384
LETTERS = (*string.ascii_letters, *string.digits, *string.punctuation)
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def vocabulary(*tokens):
    return {token: number for number, token in enumerate(tokens)}


def llama(**settings):
    raw = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = vocabulary("<unk>", "<s>", "</s>", *raw, "▁", *LETTERS)
    return hf.LlamaTokenizer(vocab=tokens, merges=[], **settings)


def gemma(**settings):
    raw = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = vocabulary("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *raw, "▁", *LETTERS)
    return hf.GemmaTokenizer(vocab=tokens, merges=[], **settings)


def qwen2(**settings):
    return hf.Qwen2Tokenizer(vocab=vocabulary("<|endoftext|>", *BYTES), merges=[], **settings)


def gpt_neox():
    return hf.GPTNeoXTokenizer(vocab=vocabulary("<|endoftext|>", *BYTES), merges=[])


def opt():
    found = hf.GPT2Tokenizer(
        vocab=vocabulary("<s>", "<pad>", "</s>", *BYTES), merges=[], bos_token="</s>"
    )
    found.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="</s> $A", pair="</s> $A </s> $B", special_tokens=[("</s>", 2)]
    )
    return found


# name -> the tokenizer, and the special tokens that it puts in front of a text.
FAMILIES = {
    "Llama": (lambda: llama(add_bos_token=True), ["<s>"]),
    "Llama without BOS": (lambda: llama(add_bos_token=False), []),
    "Llama with EOS": (lambda: llama(add_bos_token=True, add_eos_token=True), ["<s>"]),
    "Gemma": (lambda: gemma(add_bos_token=True), ["<bos>"]),
    "Qwen2": (qwen2, []),
    "Qwen2 with a BOS token": (lambda: qwen2(bos_token="<|endoftext|>"), []),
    "OPT": (opt, ["</s>"]),
    "GPT-NeoX": (gpt_neox, []),
}
FEW = ("Llama with EOS", "Qwen2 with a BOS token", "OPT")


def config(positions=4096):
    return hf.LlamaConfig(
        vocab_size=SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
    )


def load(name, folder):
    FAMILIES[name][0]().save_pretrained(folder)
    return load_tokenizer(str(folder))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    return request.param, load(request.param, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def tokenizer(family):
    return family[1]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(config()).eval()


def started(tokenizer, text):
    """Ids of `tokenizer(text)` without what the tokenizer appends."""
    ids = tokenizer(text, verbose=False)["input_ids"]
    return ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids


def test_leading_tokens_are_what_the_tokenizer_puts_in_front(family):
    name, tokenizer = family
    leading = tokenizer.convert_tokens_to_ids(FAMILIES[name][1])
    assert leading_tokens(tokenizer) == leading
    ids = tokenizer(TEXT)["input_ids"]
    assert ids[: len(leading)] == leading and ids[len(leading)] not in tokenizer.all_special_ids


def test_prompts(tokenizer):
    marked = f"{tokenizer.bos_token or tokenizer.pad_token}{TEXT}"
    for text in (TEXT, "", marked):
        assert encode_prompt(tokenizer, text) == tokenizer(text)["input_ids"]
        assert encode_start(tokenizer, text) == started(tokenizer, text)


def test_a_prompt_of_the_command_line(tokenizer):
    ids = generate.encode(config(), tokenizer, TEXT, 8)
    assert ids == tokenizer(TEXT)["input_ids"]


def test_windows(tokenizer):
    leading = leading_tokens(tokenizer)
    rows = windows(tokenizer, TEXT * 9, 32, 128)
    assert rows.shape == (4, 32) and rows.dtype == torch.long
    assert rows[0].tolist() == tokenizer(TEXT * 9)["input_ids"][:32]
    text = encode(tokenizer, TEXT * 9)
    assert rows[:, len(leading) :].flatten().tolist() == text[: 4 * (32 - len(leading))]
    assert all(row[: len(leading)].tolist() == leading for row in rows)


def test_calibration_windows(tokenizer, tmp_path):
    text = f"{TEXT * 5}<|endoftext|>{TEXT * 6}"
    file = tmp_path / "calib.txt"
    file.write_text(text)
    rows = calibration_text.calibration_windows(tokenizer, config(64), [file], 512)
    stream = [token for part in documents(text) for token in started(tokenizer, part)]
    leading = leading_tokens(tokenizer)
    assert len(rows) == len(stream) // 64
    for number, row in enumerate(rows.tolist()):
        own = stream[number * 64 : number * 64 + 64]
        assert row == leading + own[len(leading) :]


class Recorder:
    """A reader that keeps the contexts it is given."""

    def __init__(self):
        self.contexts = []

    def prefill(self, ids):
        self.contexts.append(list(ids))

    def answer(self, question, num_new, stops=()):
        return []

    def log_likelihood(self, ending):
        return 0.0


def test_needle(tokenizer, model, monkeypatch):
    prompts, recorder, build = [], Recorder(), needle.build_sample

    def built(*args, **options):
        sample = build(*args, **options)
        prompts.append(sample.prompt)
        return sample

    monkeypatch.setattr(needle, "build_sample", built)
    needle.evaluate_needle(
        model, tokenizer, lengths=[2000], num_contexts=2, facts_per_context=2, reader=recorder
    )
    assert len(prompts) == 2
    assert recorder.contexts == [started(tokenizer, prompt) for prompt in prompts]
    assert max(map(len, recorder.contexts)) <= 2000


def test_tasks(tokenizer, model):
    rows = [
        GenerationTask(prompt=TEXT, answer="x"),
        LateQuestionTask(context=TEXT, question="Who?", answer="x"),
        ChoiceTask(contexts=(TEXT, TEXT), choices=("b", "c"), label=0),
    ]
    recorder = Recorder()
    run.run_tasks(model, tokenizer, rows, reader=recorder)
    whole = tokenizer(TEXT)["input_ids"]
    assert recorder.contexts == [whole, *[started(tokenizer, TEXT)] * 2]
    (prompt,) = rows[2].prompts(tokenizer)
    both = [[*prompt.context, *ending] for ending in prompt.endings]
    assert both == [started(tokenizer, TEXT + choice) for choice in "bc"]


def test_a_context_that_is_cut_keeps_what_the_tokenizer_puts_in_front(tokenizer):
    leading, ids = leading_tokens(tokenizer), encode_start(tokenizer, TEXT)
    cut = run._fit(Prompt(context=ids, num_new=4), 24, leading).context
    assert cut == leading + ids[len(leading) - 20 :] and len(cut) == 20
    text = ids[len(leading) :]  # a context without them, as a chat template may write it
    assert run._fit(Prompt(context=text, num_new=4), 24, leading).context == text[-20:]


def test_a_chat_template_that_writes_bos_adds_no_second_one(tokenizer):
    turns = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    plain = ruler.examples("keys", tokenizer, length=1500, contexts=1, facts=1)[0].context
    tokenizer.chat_template = "{{ bos_token }}" + turns
    try:
        (row,) = ruler.examples("keys", tokenizer, length=1500, contexts=1, facts=1)
        whole = encode_chat(tokenizer, plain)
    finally:
        tokenizer.chat_template = None
    assert row.prompts(tokenizer)[0].context == whole[:-1]  # without "]"


@pytest.fixture(scope="module")
def served(model):
    serving = pytest.importorskip("serving")
    llm = LLM(model, tokenizer=qwen2(), max_sequences=2, max_tokens=256, kv_bytes=2**22)
    with serving.serving(llm) as small:
        yield small


@pytest.mark.parametrize("name", FEW)
def test_the_server(name, served, tmp_path):
    tokenizer = served.llm.tokenizer = load(name, tmp_path)
    ids = tokenizer(TEXT)["input_ids"]
    assert served.llm.encode(TEXT) == ids
    assert served.ask("/tokenize", prompt=TEXT)["tokens"] == ids
    bare = served.ask("/tokenize", prompt=TEXT, add_special_tokens=False)["tokens"]
    assert bare == encode(tokenizer, TEXT)
    how = {"max_tokens": 4, "temperature": 0, "logprobs": 1, "ignore_eos": True}
    text, same = (served.ask(prompt=prompt, **how) for prompt in (TEXT, ids))
    assert text["usage"]["prompt_tokens"] == len(ids)
    assert text["choices"][0]["logprobs"] == same["choices"][0]["logprobs"]


def test_a_packed_context_does_not_end(model, tmp_path):
    tokenizer = load("Llama with EOS", tmp_path)
    how = {"evict": "keydiff", "page": 8, "max_sequences": 2, "max_tokens": 256}
    llm = LLM(model, tokenizer=tokenizer, kv_bytes=2**22, **how)
    packed = llm.pack(TEXT * 2, factor=2, measure=False)
    assert list(packed.token_ids) == started(tokenizer, TEXT * 2)


@pytest.mark.parametrize("name", ["reference:gqa", "reference:mha"])
def test_reference_models_put_bos_in_front(name):
    tokenizer = load_tokenizer(name)
    assert tokenizer(TEXT)["input_ids"] == [0, *encode(tokenizer, TEXT)]
    assert leading_tokens(tokenizer) == [0]
