"""Bad inputs and what a user is told, by where they were made: `test_bad_inputs.py` runs them all
and docs/errors.md shows them.

A call is a command line, perhaps with a variable before it, or Python. To add one: write it into a
group, run the test, and put in what it says; a group is a line of GROUPS. The files that calls name
are made by `files`. Names of a registry come from it, through `names`.
"""

from collections.abc import Iterable

from kvfold import published, recipes
from kvfold.cache.eviction.policies import POLICIES
from kvfold.cli.methods import PUBLISHED
from kvfold.compression.bases import recipes_where
from kvfold.config import AUTO, CacheConfig, settings_of
from kvfold.evaluation import suites, tasks
from kvfold.evaluation.suites.longbench import DATA_SETS

LISTS: dict[str, str] = {}  # what a message lists, and how the page abbreviates it


def names(registry: Iterable[str], few: int = 4) -> str:
    """All names as a message lists them; the page shows the first and the last of more than few."""
    known = [*registry]
    listed = ", ".join(known)
    LISTS[listed] = f"{known[0]}, ..., {known[-1]}" if len(known) > few else listed
    return listed


OURS = [x for x in recipes.RECIPES if x not in published.PUBLISHED]
RECIPES = f"{names(OURS)}; of papers: {names(published.PUBLISHED)}"
WITH_LOSSES = recipes_where(lambda basis: basis.predicts_loss)
WITH_MAPS = recipes_where(lambda basis: basis.makes_maps)

COMMANDS = {
    "kvfold eval": (
        "kvfold eval needs MODEL. A directory, a GGUF file, a hub id, reference:gqa, or a folder of"
        " maps, which loads the model that they were made for too. For example: kvfold eval"
        " reference:gqa"
    ),
    "kvfold eval reference:gqa --bits": "--bits needs a value, as in --bits VALUE",
    "kvfold advise reference:gqa --gpu -24GB": (
        "--gpu needs a value, as in --gpu VALUE, and '-24GB' begins as a flag does: write"
        " --gpu=-24GB if it is the value"
    ),
    "kvfold advise reference:gqa --gpu=-24GB": (
        "--gpu must be one of t4, l4, a10g, rtx-4090, a100-40, l40s, a100-80, h100, h200, b200, or"
        " a size such as 24GB or 22.5GiB; got '-24GB'"
    ),
    "kvfold eval reference:gqa --bits 4 --bits 8": (
        "--bits is given more than once, and takes one value: leave out all but one; got 8 last"
    ),
    "kvfold eval reference:gqa --bits 4 --set window=128 --set window=64": (
        "--set window is given more than once, and takes one value: leave out all but one; got 64"
        " last"
    ),
    "kvfold eval reference:xyz": (
        "unknown reference model 'xyz'; reference models: reference:gqa, reference:mha, "
        "reference:smollm2, reference:qwen2.5-coder-1.5b"
    ),
    "kvfold eval nowhere/": (
        "cannot load a model from 'nowhere/': there is no such directory, the hub cannot be "
        "reached, and this machine has no copy of such a hub id: give a directory"
    ),
    "kvfold eval ./nowhere": "model directory ./nowhere does not exist",
    "kvfold eval someone/some-model": (
        "cannot load a model from 'someone/some-model': there is no such directory, the hub "
        "cannot be reached, and this machine has no copy of such a hub id: give a directory"
    ),
    "kvfold eval folder": "folder is not a model directory: it has no config.json",
    "kvfold eval text.txt": "text.txt is not a model directory: it has no config.json",
    "kvfold serve reference:gqa --engine vllm --evict random --keep-tokens .5": (
        "--evict: vLLM has one block table for all heads of a layer, so heads cannot evict "
        "different tokens; leave it out, or serve the model with kvfold.LLM"
    ),
    "kvfold serve reference:gqa --engine vllm --bits 4 --set format=kivi": (
        "--set format: tokens that wait in 16 bits until they are packed, as with kivi, need "
        "blocks that no other sequence shares; "
        "leave it out, or serve the model with kvfold.LLM"
    ),
    "kvfold serve reference:gqa --engine vllm --set max-queue=4": (
        "--set max-queue is a setting of kvfold's own server, not of vLLM's: leave out "
        "either it or --engine vllm"
    ),
    "kvfold serve reference:gqa --engine vllm --set device=cpu": (
        "--set device: vLLM uses the devices that it was built for; leave it out, and select "
        "GPUs with CUDA_VISIBLE_DEVICES"
    ),
    "kvfold serve reference:gqa --engine vllm --set context=book=book.kvf": (
        "--set context is a setting of kvfold's own server: leave out either it or --engine vllm"
    ),
    "kvfold serve reference:gqa --engine vllm --set allow-origins=https://a.example": (
        "--set allow-origins is a setting of kvfold's own server: leave out either it or "
        "--engine vllm"
    ),
    "kvfold serve reference:gqa --engine vllm --set no-request-log": (
        "--set no-request-log is a setting of kvfold's own server: leave out either it or "
        "--engine vllm"
    ),
    "kvfold serve reference:gqa --engine vllm --set shadow=0.1%": (
        "--set shadow is a setting of kvfold's own server: leave out either it or --engine vllm"
    ),
    "kvfold serve reference:gqa --set shadow=150%": (
        "--set shadow must be a share such as 0.1% or .001, at most 1; got '150%'"
    ),
    "kvfold serve reference:gqa --set allow-origins=example.org": (
        "--set allow-origins must be origins, such as https://example.org, without a path, "
        "or *; got "
        "'example.org'"
    ),
    "kvfold serve reference:gqa --host ' '": (
        "--host is empty: give an address, such as 127.0.0.1, or leave it out"
    ),
    "kvfold serve reference:gqa --served-model-name ' '": (
        "--served-model-name is empty: give a name, or leave it out"
    ),
    "kvfold advise reference:gqa --set kv-bytes=100000000000000000000": (
        "Invalid value for --set kv-bytes: must be below 9.22337e+18, got 100000000000000000000"
    ),
    "kvfold serve reference:gqa --set context=book.kvf": (
        "--set context must be NAME=FILE, such as book=book.kvf; got 'book.kvf'"
    ),
    "kvfold serve reference:gqa --set context=book=none.kvf": (
        "packed context none.kvf: no such file; `kvfold pack` makes one"
    ),
    "kvfold serve reference:gqa --set context=book=none.kvf --bits 4": (
        "the file of --set context sets how the cache stores tokens: of these settings, only "
        "--set kv-bytes can be given with it"
    ),
    "kvfold serve reference:gqa --engine sglang": (
        'Invalid value "sglang" for --engine. Choose from: "kvfold", "vllm".'
    ),
    "kvfold explode": (
        'Unknown command "explode". Available commands: advise, compress, recover, generate, '
        "serve, route, inspect, eval, ..."
    ),
    "kvfold eval reference:gqa --bogus 1": "Unknown option: --bogus. Did you mean --bits?",
    "kvfold eval reference:gqa --set dtype=int8": (
        'Invalid value "int8" for --set dtype. Choose from: "auto", "float32", "bfloat16", '
        '"float16".'
    ),
    "kvfold eval reference:gqa --device nope": (
        "--device must be cpu, cuda, cuda:N or mps; got 'nope'"
    ),
    "kvfold eval reference:gqa --device meta": (
        "--device must be cpu, cuda, cuda:N or mps; got 'meta'"
    ),
    "kvfold eval reference:gqa --device mps": (
        "--device mps: of mps devices this machine has none; another one, or --device cpu, works"
    ),
    "kvfold eval reference:gqa --device cuda:99": (
        "--device cuda:99: of cuda devices this machine has none; another one, or --device "
        "cpu, works"
    ),
    "KVFOLD_BACKEND=triton kvfold eval reference:gqa --bits 4": (
        "KVFOLD_BACKEND=triton: kernels run on a GPU, and this model is on cpu; unset it, or "
        "set it to auto"
    ),
    "KVFOLD_BACKEND=fast kvfold eval reference:gqa --bits 4": (
        "KVFOLD_BACKEND must be one of auto, triton, numba, reference; got 'fast'"
    ),
    "kvfold eval damaged": "damaged/config.json: not a JSON object; copy it again",
    "kvfold generate other-tokenizer --prompt 'The old house'": (
        "the tokenizer gives token 1167, but the model has embeddings of tokens 0 to 63 "
        "only: they do not belong together, take the model's own"
    ),
    "kvfold eval other-tokenizer": (
        "the tokenizer gives token 4092, but the model has embeddings of tokens 0 to 63 "
        "only: they do not belong together, take the model's own"
    ),
    "kvfold eval float7": (
        "cannot read the config.json of 'float7': module 'torch' has no attribute 'float7'; "
        "copy it again"
    ),
    "kvfold eval no-heads": (
        "no-heads/config.json: num_attention_heads must be at least 1, got 0; copy it again"
    ),
    "kvfold eval width-text": (
        "width-text/config.json: hidden_size must be a whole number, at least 1; got '256'; "
        "copy it again"
    ),
    "kvfold eval minus-layers": (
        "minus-layers/config.json: num_hidden_layers must be at least 1, got -1; copy it again"
    ),
    "kvfold eval quantized-list": (
        "quantized-list/config.json: quantization_config must be a dict; got ['gptq']; copy it "
        "again"
    ),
    "kvfold eval quantized-text": (
        "quantized-text/config.json: quantization_config must be a dict; got 'gptq'; copy it again"
    ),
    "kvfold eval deep": "deep/config.json: nested too deeply; copy it again",
    "kvfold eval digits": (
        "digits/config.json: holds a number of thousands of digits; copy it again"
    ),
    "kvfold eval torn-tokenizer": (
        "torn-tokenizer/tokenizer.json: not a JSON object; copy it again"
    ),
    "kvfold eval empty-tokenizer": (
        "empty-tokenizer/tokenizer.json: not a JSON object; copy it again"
    ),
    "kvfold eval other-shape": (
        "cannot read the tokenizer files of 'other-shape': KeyError 'added_tokens'; copy it again"
    ),
    "kvfold eval listed-tokenizer": (
        "listed-tokenizer/tokenizer_config.json: not a JSON object; copy it again"
    ),
    "KVFOLD_CACHE=~nouser/x kvfold eval reference:smollm2": (
        "KVFOLD_CACHE: there is no home ~nouser/x; set a whole path"
    ),
    "kvfold eval reference:gqa reference:mha": (
        "unexpected 'reference:mha': an option takes one value, quoted if it has spaces; see --help"
    ),
}
SIZES = {
    "kvfold compress reference:gqa": (
        "kvfold compress needs --output. A new directory to write to. For example: kvfold compress"
        " reference:gqa --output maps"
    ),
    "kvfold compress reference:gqa --fold --recipe zack --factor 4 --output new": (
        f"recipe 'zack' predicts no losses to weigh bits by; use {WITH_LOSSES}"
    ),
    "kvfold compress reference:gqa --set hybrid=ppl<=1.1 --output new": (
        "--set hybrid needs a folded model: add --fold"
    ),
    "kvfold compress reference:gqa --set recover=2 --output new": (
        "--set recover needs a folded model: add --fold"
    ),
    "kvfold compress reference:gqa --budget ppl<=1.1 --set fastest --output new": (
        "--set fastest needs a folded model: add --fold"
    ),
    "kvfold compress reference:gqa --recipe palu-m --output new": (
        "--recipe palu-m makes no maps beside the weights: add --fold, which folds it into "
        f"them, or use {WITH_MAPS}"
    ),
    "kvfold compress reference:gqa --set windows --fold --output new": (
        "--set windows says which layers get maps: leave --set windows or --fold out"
    ),
    "kvfold compress reference:gqa --set bytes-per-token=1e6 --output new": (
        "--set bytes-per-token must be at most 7168, what the uncompressed cache takes at 16 "
        "bits; "
        "got 1e+06"
    ),
    "kvfold compress reference:gqa --set keep=1.5 --output new": (
        "--set keep must be in (0, 1], got 1.5; it is the share of the cache to keep"
    ),
    "kvfold compress reference:gqa --set keep=nan --output new": (
        "--set keep must be in (0, 1], got nan; it is the share of the cache to keep"
    ),
    "kvfold compress reference:gqa --set keep=half --output new": (
        "Invalid value for --set keep: must be a number, got half"
    ),
    "kvfold compress reference:gqa --factor 0.5 --output new": (
        "--factor must be at least 1 and below 1000, got 0.5"
    ),
    "kvfold compress reference:gqa --set bytes-per-token=0 --output new": (
        "--set bytes-per-token must be above 0, got 0.0"
    ),
    "kvfold compress reference:gqa --budget '1%' --output new": (
        "--budget 1% is not of the form 'ppl<=RATIO' with a ratio of at least 1 to the "
        "original's perplexity; for 1 % more write 'ppl<=1.01'. For the accuracy of a task write "
        "'accuracy>=SHARE' with a share below 1 of the original's accuracy; for 1 % less write "
        "'accuracy>=0.99'"
    ),
    "kvfold compress reference:gqa --budget 'accuracy>=99' --output new": (
        "--budget accuracy>=99 is not of the form 'accuracy>=SHARE' with a share below 1 of the "
        "original's accuracy; for 1 % less write 'accuracy>=0.99'"
    ),
    "kvfold compress reference:gqa --budget 'accuracy>=0.99' --output new": (
        "--budget accuracy>=0.99 needs questions to measure the accuracy on: give files of them "
        "with --set tasks"
    ),
    "kvfold compress reference:gqa --budget 'ppl<=1.01' --set tasks=tasks.jsonl --output new": (
        "--set tasks are the questions of a budget of accuracy: give --budget accuracy>=0.99 too, "
        "or leave --set tasks out"
    ),
    "kvfold compress reference:gqa --fold --set hybrid=accuracy>=0.99 --output new": (
        "--set hybrid accuracy>=0.99 is not of the form 'ppl<=RATIO' with a ratio of at least 1 to "
        "the original's perplexity; for 1 % more write 'ppl<=1.01'"
    ),
    "kvfold compress reference:gqa --set hybrid=narrow=0.5 --output new": (
        "--set hybrid has no 'narrow': give some of keys, values, low_rank_keys, low_rank_values, "
        "important, important_last, by, as name=value"
    ),
    "kvfold compress reference:gqa --set hybrid=keys=half --output new": (
        "--set hybrid: keys must be a number; got 'half'"
    ),
    "kvfold compress reference:gqa --set hybrid=keys=0.5,low_rank_keys=0.25 --output new": (
        "--set hybrid: low_rank_keys must be at least keys: unimportant tokens lose more than "
        "important "
        "ones; got 0.25 and 0.5"
    ),
    "kvfold compress reference:gqa --set hybrid=important=2 --output new": (
        "--set hybrid: important must be in [0, 1], got 2.0"
    ),
    "kvfold compress reference:gqa --fold --recipe palu-m --set hybrid=keys=0.25 --output new": (
        "--set hybrid: recipe 'palu-m' stores pre_rope keys, but a low-rank entry is the "
        "first numbers of each head's keys and values, as they are scored: take recipe zdc, "
        "zack or fast"
    ),
    "kvfold compress reference:gqa --set keep=0.5 --budget 'ppl<=1.01' --output new": (
        "--set keep=0.5 and --budget ppl<=1.01 exclude each other: each decides the size alone"
    ),
    "kvfold compress reference:gqa --set align=0 --output new": (
        "--set align must be at least 1 and below 1e+06, got 0"
    ),
    "kvfold compress reference:gqa --factor 4 --set align=8 --output new": (
        "--set align is of ranks whose bits are not planned; tiers are whole units of what "
        "kernels "
        "read: leave it out, or say the size as --set keep"
    ),
    "kvfold compress reference:gqa --set align=8 --output new": (
        "--set align is of ranks whose bits are not planned; tiers are whole units of what "
        "kernels "
        "read: leave it out, or say the size as --set keep"
    ),
    "kvfold compress reference:gqa --factor 4 --set levels=5,4 --output new": (
        "--set levels must be some of 8, 6, 4, 3, 2, 1; got (5, 4)"
    ),
    "kvfold compress reference:gqa --factor 4 --set levels=many --output new": (
        "--set levels: 'many' is not a comma-separated list of numbers such as 8,4,2 or all"
    ),
    "kvfold compress reference:gqa --set keep=0.5 --set levels=8,4 --output new": (
        "--set levels are the bits of planned numbers, and no bits are planned: give "
        "--factor or "
        "--set bytes-per-token too"
    ),
    "kvfold compress reference:gqa --factor 4 --set prefer=quick --output new": (
        'Invalid value "quick" for --set prefer. Choose from: "speed", "balanced", "size".'
    ),
    "kvfold compress reference:gqa --set keep=0.5 --set prefer=speed --output new": (
        "--set prefer speed is how bits are planned, and none are: say the size as --factor or "
        "--set bytes-per-token"
    ),
    "kvfold compress reference:gqa --factor 4 --set prefer=size --set levels=8,4 --output new": (
        "--set levels and --set prefer size exclude each other: each decides which bits "
        "numbers may have"
    ),
    "kvfold compress reference:gqa --factor 4 --set prefer=speed --recipe small --output new": (
        "--set prefer speed plans a latent of keys per head and one of all heads' values, "
        "and recipe 'small' has others: use swift or lean, or leave --set prefer out"
    ),
    "kvfold compress reference:gqa --factor 300 --set prefer=speed --output new": (
        "--factor 300 leaves 191 bits a token, and each of 7 layers takes at least 216: ask for a "
        "larger cache"
    ),
    "kvfold compress reference:gqa --set fastest --output new": (
        "--set fastest needs a limit on the loss: give --budget too"
    ),
    "kvfold compress reference:gqa --set batch=8 --output new": (
        "--set batch is a setting of --set fastest: give --set fastest too, or leave it out"
    ),
    "kvfold compress reference:gqa --goal memory --recipe lean --output new": (
        "--goal memory chooses a recipe, and so does --recipe lean: leave one out"
    ),
    "kvfold compress reference:gqa --budget 'ppl<=1.01' --set fastest --recipe lean --output new": (
        "--set fastest tries several recipes, sizes and plans itself: leave --recipe out"
    ),
    "kvfold compress reference:gqa --budget ppl<=1.1 --set fastest --set prefer=speed --output x": (
        "--set fastest tries several recipes, sizes and plans itself: leave --set prefer out"
    ),
    "kvfold compress reference:gqa --fold --budget ppl<=1.1 --set fastest --set context=9999"
    " --output x": ("--set context must be at most 4096, the model's positions; got 9999"),
    "kvfold compress reference:gqa --set recover=-1 --output new": (
        "--set recover must be at least 0 steps, got -1; 0 leaves the maps alone"
    ),
    "kvfold recover reference:gqa --output new": (
        "reference:gqa is not compressed, so there is nothing to recover: `kvfold compress "
        "--fold` first"
    ),
    "kvfold recover reference:gqa --steps 0 --output new": "--steps must be at least 1, got 0",
    "kvfold recover reference:gqa --set learning-rate=0 --output new": (
        "--set learning-rate must be above 0, got 0.0"
    ),
    "kvfold recover reference:gqa --text nowhere.txt --output new": (
        "file nowhere.txt: no such file; give a text file, plain, .xz or .gz"
    ),
    "kvfold recover reference:gqa --output text.txt": (
        "output text.txt exists and is not an empty directory; name another one"
    ),
    "kvfold compress reference:gqa --recipe tiny --output new": (
        f"unknown recipe 'tiny'; recipes: {RECIPES}"
    ),
    "kvfold compress reference:gqa --calib-tokens -5 --output new": (
        "--calib-tokens must be at least 1, got -5"
    ),
    "kvfold compress reference:gqa --calib-tokens 100 --output new": (
        "--calib-tokens must be at least 4096 to calibrate this model, 4 windows, got 100"
    ),
    "kvfold compress reference:gqa --set seed=-1 --output new": (
        "--set seed must be at least 0 and below 9.22337e+18, got -1"
    ),
    "kvfold compress compressed --output new": (
        "this model is compressed already; start from the original checkpoint"
    ),
    "kvfold compare reference:gqa --keep 0.5,2": (
        "--keep must be in (0, 1], got 2.0; it is the share of the cache to keep"
    ),
    "kvfold compare reference:gqa --keep 0.5,half": (
        "--keep: '0.5,half' is not a comma-separated list of numbers such as .5,.25"
    ),
    "kvfold compare reference:gqa --recipes small,big": f"unknown recipe 'big'; recipes: {RECIPES}",
    "kvfold compare reference:gqa --methods ';'": (
        "--methods: ';' names none; separate methods by semicolons"
    ),
    "kvfold compare reference:gqa --methods 'swift 4x; zack half'": (
        "--methods: 'zack half': a size is written like 4x or .25, not 'half'"
    ),
    "kvfold compare reference:gqa --methods 'zack 4x'": (
        f"recipe 'zack' predicts no losses to weigh bits by; use {WITH_LOSSES}"
    ),
    "kvfold compare reference:gqa --methods 'zack .5 --evct h2o'": (
        "--methods: 'zack .5 --evct h2o': Unknown option: --evct. Did you mean --evict?"
    ),
    "kvfold compare reference:gqa --methods 'swift 4x --bits 5'": (
        "--methods: 'swift 4x --bits 5': --bits must be one of 16, 8, 6, 4, 3, 2, 1; got 5"
    ),
    "kvfold compare reference:gqa --methods 'KIVI 3.5 bits'": (
        "--methods: 'KIVI 3.5 bits': not a recipe, a size and options, and none of the names "
        f"ours, published, papers, {names(PUBLISHED)}"
    ),
    "kvfold compare reference:gqa --methods 'swift 4x' --set bits=4": (
        "--methods sets the recipe, size and cache of every method: leave --set bits out, or "
        "write it into a method"
    ),
    "kvfold compare reference:gqa --methods 'zack .5 --bits 4 --format kvquant'": (
        "format='kvquant' needs levels that were calibrated on the model: compress it with recipe "
        "kvquant (keep 1) or kvquant-z first, or take another format"
    ),
    "kvfold compare reference:gqa --set align=0": "--set align must be at least 1 and below "
    "1e+06, got 0",
    "kvfold compare reference:gqa --recipes zack --keep .5,.25 --baseline zack": (
        "--baseline must be one of original, zack 0.5, zack 0.25; got 'zack'"
    ),
    "kvfold compare reference:gqa --set calib-tokens=-5": "--set calib-tokens must be at "
    "least 1, got -5",
    "kvfold compare reference:gqa --set calib-tokens=100": (
        "--set calib-tokens must be at least 4096 to calibrate this model, 4 windows, got 100"
    ),
    "kvfold compare compressed": (
        "this model is compressed already; start from the original checkpoint"
    ),
    "kvfold frontier reference:gqa --factors 2,0.5": (
        "--factors must be at least 1 and below 1000, got 0.5"
    ),
    "kvfold frontier reference:gqa --factors 2,many": (
        "--factors: '2,many' is not a comma-separated list of numbers such as 2,4,8"
    ),
    "kvfold frontier reference:gqa --set bits=5": (
        "--set bits must be one of 16, 8, 6, 4, 3, 2, 1; got 5"
    ),
    "kvfold frontier reference:gqa --set levels=5": (
        "--set levels must be some of 8, 6, 4, 3, 2, 1; got (5,)"
    ),
    "kvfold frontier compressed": (
        "this model is compressed already; start from the original checkpoint"
    ),
    "kvfold inspect reference:gqa --keep 0.25": (
        "--keep, --set align and settings of calibration need a plan: give its --recipe too"
    ),
    "kvfold inspect reference:gqa --recipe zack --set align=0": (
        "--set align must be at least 1 and below 1e+06, got 0"
    ),
    "kvfold inspect compressed --recipe zack": (
        "compressed is compressed already, and --recipe plans for an original model: leave "
        "it out, or name the original"
    ),
    "kvfold compress reference:gqa --set bytes-per-token=0.001 --output new": (
        "--set bytes-per-token=0.001 leaves 0 bits a token, and each of 7 layers takes at least "
        "40: ask for a larger cache"
    ),
    "kvfold compress reference:gqa --set keep=1e-300 --output new": (
        "--set keep=1e-300 leaves 0 numbers a token, and each of 7 layers takes at least 16: ask "
        "for a larger cache, or a smaller --set align than 16"
    ),
    "kvfold compress reference:gqa --factor 999 --output new": (
        "--factor 999 leaves 57 bits a token, and each of 7 layers takes at least 40: ask for "
        "a larger cache"
    ),
    "kvfold compress reference:gqa --set align=1000000000000 --output new": (
        "--set align must be at least 1 and below 1e+06, got 1000000000000"
    ),
    "kvfold compare reference:gqa --recipes ,": (
        "--recipes: ',' is not a comma-separated list of names"
    ),
    "kvfold compare reference:gqa --keep 0.5,0.0001": (
        "--keep 0.0001 leaves 0 numbers a token, and each of 7 layers takes at least 16: ask "
        "for a larger cache, or a smaller --set align than 16"
    ),
    "kvfold inspect reference:gqa --recipe zack --keep 0.001": (
        "--keep 0.001 leaves 3 numbers a token, and each of 7 layers takes at least 16: ask "
        "for a larger cache, or a smaller --set align than 16"
    ),
}
EXAMPLES = f"legal examples: {tasks.LEGAL_EXAMPLES}"
FILES = {
    "kvfold pack reference:gqa --context text.txt --output text.txt": (
        "--output would replace text.txt, which --context reads: name another file"
    ),
    "kvfold eval compressed --json compressed/config.json": (
        "--json would replace compressed/config.json, a file of the folder that MODEL reads: name "
        "another file"
    ),
    "kvfold eval reference:gqa --json /dev/null": "/dev/null is a device or a pipe; name a file",
    "kvfold compress reference:gqa --output new --stats /dev/null": (
        "/dev/null is a device or a pipe; name a file"
    ),
    "kvfold compress reference:gqa --output /": (
        "cannot write /: it is the root of all folders; name one in it"
    ),
    "kvfold compare reference:gqa --html out --json out": (
        "--html and --json both name out: give each a file of its own"
    ),
    "kvfold eval reference:gqa --text folder": (
        "file folder: not a regular file; give a text file, plain, .xz or .gz"
    ),
    "kvfold compress reference:gqa --output folder": (
        "output folder exists and is not an empty directory; name another one"
    ),
    "kvfold compress reference:gqa --output text.txt/new": (
        "cannot write text.txt/new: text.txt is a file; name another folder"
    ),
    "kvfold compress reference:gqa --output new --stats folder": (
        "folder is a directory; name a file"
    ),
    "kvfold compress reference:gqa --output new --stats nowhere/new.safetensors": (
        "cannot write nowhere/new.safetensors: folder nowhere does not exist; create it first"
    ),
    "kvfold compress reference:gqa --output new --calib nowhere.txt": (
        "file nowhere.txt: no such file; give a text file, plain, .xz or .gz"
    ),
    "kvfold compress reference:gqa --output new --calib blank.txt": "file blank.txt: empty",
    "kvfold eval reference:gqa --text nowhere.txt": (
        "file nowhere.txt: no such file; give a text file, plain, .xz or .gz"
    ),
    "kvfold eval reference:gqa --text latin1.txt": "file latin1.txt: not utf-8 text at byte 1",
    "kvfold eval reference:gqa --text short.txt": (
        "short: 4 tokens are available but one window of --set ctx=1024 needs 1023; give "
        "more --text or a smaller --set ctx"
    ),
    "kvfold eval reference:gqa --text damaged.gz": (
        "file damaged.gz: cannot be read (Compressed file ended before the end-of-stream "
        "marker was reached)"
    ),
    "kvfold eval reference:gqa --tasks nowhere.jsonl": (
        "file nowhere.jsonl: no such file; give a text file, plain, .xz or .gz"
    ),
    "kvfold eval reference:gqa --tasks text.txt": (
        f"task text.txt line 1: not a JSON object; {EXAMPLES}"
    ),
    "kvfold eval reference:gqa --tasks keys.jsonl": (
        f"task keys.jsonl line 1: keys question, answer; {EXAMPLES}"
    ),
    "kvfold eval reference:gqa --tasks label.jsonl": (
        "task label.jsonl line 1: label is '2'; it must be an integer from 0 to 1"
    ),
    "kvfold eval reference:gqa --tasks question.jsonl": (
        "task question.jsonl line 1: question is ' '; it must be a string that is not blank"
    ),
    "kvfold eval reference:gqa --json nowhere/new.json": (
        "cannot write nowhere/new.json: folder nowhere does not exist; create it first"
    ),
    "kvfold eval reference:gqa --json folder": "folder is a directory; name a file",
    "kvfold compare reference:gqa --html nowhere/new.html": (
        "cannot write nowhere/new.html: folder nowhere does not exist; create it first"
    ),
    "kvfold demo --output nowhere/new.html": (
        "cannot write nowhere/new.html: folder nowhere does not exist; create it first"
    ),
    "kvfold generate reference:gqa --prompt-file nowhere.txt": (
        "file nowhere.txt: no such file; give a text file, plain, .xz or .gz"
    ),
    "kvfold generate reference:gqa --prompt-file latin1.txt": (
        "file latin1.txt: not utf-8 text at byte 1"
    ),
    "kvfold compress reference:gqa --output ''": (
        "cannot write .: it is the folder you are in; name one in it"
    ),
    "kvfold eval reference:gqa --text": ("--text needs a value, as in --text VALUE"),
    "kvfold eval reference:gqa --tasks surrogate.jsonl": (
        "task surrogate.jsonl line 1: holds half a character, a surrogate without the other; "
        + EXAMPLES
    ),
    "kvfold eval reference:gqa --tasks deep.jsonl": (
        f"task deep.jsonl line 1: nested too deeply; {EXAMPLES}"
    ),
    "kvfold eval reference:gqa --tasks digits.jsonl": (
        f"task digits.jsonl line 1: holds a number of thousands of digits; {EXAMPLES}"
    ),
}
SUITES = {
    "kvfold eval reference:gqa --suite poetry=gsm8k.jsonl": (
        f"--suite: unknown suite 'poetry'; suites: {names(suites.SUITES)}"
    ),
    "kvfold eval reference:gqa --suite code,math": (
        "--suite: code has no file: write code=FILE, or give --set suite-data, the folder of "
        "HumanEval.jsonl.gz"
    ),
    "kvfold eval reference:gqa --suite code --set suite-data=folder": (
        "suite code: folder has no HumanEval.jsonl.gz or HumanEval.jsonl; name the file, such as "
        "code=FILE"
    ),
    "kvfold eval reference:gqa --suite code --set suite-data=nowhere": (
        "suite code: nowhere has no HumanEval.jsonl.gz or HumanEval.jsonl; name the file, such "
        "as code=FILE"
    ),
    "kvfold eval reference:gqa --suite code=nowhere.jsonl": (
        "file nowhere.jsonl: no such file; give a text file, plain, .xz or .gz"
    ),
    "kvfold eval reference:gqa --suite code=blank.txt": "file blank.txt: empty",
    "kvfold eval reference:gqa --suite code=text.txt": (
        "suite code: text.txt line 1: not a JSON object; a line of HumanEval has the keys "
        "task_id, prompt, entry_point, test"
    ),
    "kvfold eval reference:gqa --suite code=gsm8k.jsonl": (
        "suite code: gsm8k.jsonl line 1: keys question, answer; a line of HumanEval has the keys "
        "task_id, prompt, entry_point, test"
    ),
    "kvfold eval reference:gqa --suite math=untested.jsonl": (
        "suite math: untested.jsonl line 1: keys task_id, prompt, entry_point, test; a line of "
        "GSM8K has the keys question, answer"
    ),
    "kvfold eval reference:gqa --suite math=number.jsonl": (
        "suite math: number.jsonl line 1: answer is 4; it must be a text that is not blank"
    ),
    "kvfold eval reference:gqa --suite math=gsm8k.jsonl --set against=text.json": (
        "--set against: text.json holds no results of math; make it with kvfold eval --suite "
        "and --json"
    ),
    "kvfold eval reference:gqa --suite math=answer.jsonl": (
        'suite math: answer.jsonl line 1: answer must end with "#### " and a number'
    ),
    "kvfold eval reference:gqa --suite code=untested.jsonl": (
        "suite code: untested.jsonl line 1: test must define the function check"
    ),
    "kvfold eval reference:gqa --suite code=other-name.jsonl": (
        "suite code: other-name.jsonl line 1: prompt must define the function that entry_point "
        "names"
    ),
    "kvfold eval reference:gqa --suite code=twice.jsonl": (
        "suite code: twice.jsonl: HumanEval/0 is on 2 lines; ids must be unique"
    ),
    "kvfold eval reference:gqa --suite math=gsm8k.jsonl,math=gsm8k.jsonl": (
        "--suite: math is given twice; give it once"
    ),
    "kvfold eval reference:gqa --suite math=gsm8k.jsonl --set suite-rows=0": (
        "--set suite-rows must be at least 1, got 0"
    ),
    "kvfold eval reference:gqa --set suite-rows=4": (
        "--set suite-rows is a setting of --suite: give --suite too, or leave it out"
    ),
    "kvfold eval reference:gqa --set engine=vllm": (
        "--set engine is a setting of --suite: give --suite too, or leave it out"
    ),
    "kvfold eval reference:gqa --set against=reference:mha": (
        "--set against is a setting of --suite: give --suite too, or leave it out"
    ),
    "kvfold eval reference:gqa --suite math=gsm8k.jsonl --set against=no-suite.json": (
        "--set against: no-suite.json holds no results of math; make it with kvfold eval "
        "--suite and "
        "--json"
    ),
    "kvfold eval reference:gqa --suite math=gsm8k.jsonl --set against=nowhere.json": (
        "file nowhere.json: no such file; give a text file, plain, .xz or .gz"
    ),
    "kvfold eval reference:gqa --suite math=gsm8k.jsonl --set against=./nowhere": (
        "model directory ./nowhere does not exist"
    ),
    "kvfold eval reference:gqa --suite math=gsm8k.jsonl --text text.txt": (
        "--suite and --text cannot run together: leave one out, and run it alone"
    ),
    "kvfold eval reference:gqa --suite math=gsm8k.jsonl --needle": (
        "--suite and --needle cannot run together: leave one out, and run it alone"
    ),
    "kvfold eval reference:gqa --suite math=gsm8k.jsonl --set engine=sglang": (
        'Invalid value "sglang" for --set engine. Choose from: "kvfold", "vllm".'
    ),
    "kvfold eval reference:gqa --suite math=gsm8k.jsonl --set engine=vllm --device cpu": (
        "--device: vLLM uses the devices that it was built for; leave it out, and select "
        "GPUs with CUDA_VISIBLE_DEVICES"
    ),
    "kvfold eval reference:gqa --suite math=gsm8k.jsonl --set engine=vllm "
    "--bits 4 --set format=kivi": (
        "--set format: tokens that wait in 16 bits until they are packed, as with kivi, need "
        "blocks that no other sequence shares; leave it out, or serve the model with kvfold.LLM"
    ),
    "kvfold eval reference:gqa --suite longbench=chinese.jsonl": (
        "suite longbench: chinese.jsonl line 1: dataset vcsum is in Chinese, and its metric needs a"
        f" program that finds words; legal data sets: {names(DATA_SETS)}"
    ),
    "kvfold eval reference:gqa --suite longbench=no-classes.jsonl": (
        "suite longbench: no-classes.jsonl line 1: all_classes is None; it must be a list of texts"
    ),
    "kvfold eval reference:gqa --suite longbench=folder": (
        "suite longbench: folder has none of "
        f"{names(f'{name}.jsonl' for name in DATA_SETS)}; name the file"
    ),
    "kvfold eval reference:gqa --suite longeval=no-question.jsonl": (
        'suite longeval: no-question.jsonl line 1: prompt must have "Now the record is over." '
        "between the lines and the question"
    ),
    "kvfold eval reference:gqa --suite ruler=text.txt": (
        "suite ruler: text.txt is no folder; give the folder of PaulGrahamEssays.json, squad.json, "
        "hotpotqa.json"
    ),
    "kvfold eval reference:gqa --suite ruler --set suite-length=100": (
        "suite ruler: RULER needs at least 960 tokens, for cwe, and the length is 100: ask for "
        "that length"
    ),
    "kvfold eval reference:gqa --suite ruler --set suite-length=100000": (
        "--set suite-length: RULER's questions of 100000 tokens exceed the model's 4096 positions; "
        "use 4096 or less"
    ),
    "kvfold eval reference:gqa --suite math=gsm8k.jsonl --set question=after": (
        "--set question is a setting of suites with long texts (longbench, longeval, ruler), "
        "and math has none: leave it out"
    ),
    "kvfold eval reference:gqa --suite longeval=lines.jsonl --set question=after "
    "--set engine=vllm": (
        "--set question is a setting of kvfold's engine: leave --set engine or --set question out"
    ),
    "kvfold eval reference:gqa --set question=after": (
        "--set question is a setting of --suite: give --suite too, or leave it out"
    ),
}
CACHE = {
    "kvfold eval reference:gqa --bits 5": "--bits must be one of 16, 8, 6, 4, 3, 2, 1; got 5",
    "kvfold eval reference:gqa --set page=0": "--set page must be at least 1 row, got 0",
    "kvfold eval reference:gqa --set kv-bytes=-3": "--set kv-bytes must be at least 1, got -3",
    "kvfold eval reference:gqa --set kv-bytes=1GB": (
        "Invalid value for --set kv-bytes: must be a whole number, got 1GB"
    ),
    "kvfold eval reference:gqa --set sub-group=4 --bits 4": (
        "--set sub-group must be at least 8 numbers, got 4"
    ),
    "kvfold eval reference:gqa --set residual=33 --bits 4": (
        "--set residual must be whole pages of 32 rows, which are packed together, got 33: "
        "take "
        "32, or another --set page"
    ),
    "kvfold eval reference:gqa --set residual=128": (
        "--set residual is a setting of packed numbers, and with 16 bits none are packed: "
        "set --bits to 8 or fewer, or leave it out"
    ),
    "kvfold eval reference:gqa --set window=32": (
        "--set window=32 keeps the last tokens exactly beside compressed ones, and here all "
        "tokens keep all numbers in 16 bits: set --bits to 8 or fewer, or leave --set window out"
    ),
    "kvfold eval reference:gqa --bits 4 --set window=-1": (
        "--set window must be in [0, 4096], got -1"
    ),
    "kvfold eval reference:gqa --bits 4 --set window=32 --evict snapkv --keep-tokens 0.5": (
        "--set window=32 keeps the last tokens beside compressed ones, of all tokens, and --evict "
        "snapkv drops some: leave one of them out"
    ),
    "kvfold eval reference:gqa --bits 4 --set window=32 --set residual=32": (
        "--set window=32 keeps the last tokens beside compressed ones, which are packed one by "
        "one; got --set residual=32: leave that out, or leave --set window out"
    ),
    "kvfold eval reference:gqa --bits 2 --set window=32 --set format=kivi": (
        "--set window=32 keeps the last tokens beside compressed ones, which are packed one by "
        "one; got --set format kivi: leave that out, or leave --set window out"
    ),
    "kvfold compress reference:gqa --set window=128 --output new": (
        "`kvfold compress` has no setting 'window': it belongs to kvfold advise, generate, serve, "
        "eval, compare; leave it out here, and set it there; got 'window=128'"
    ),
    "kvfold generate reference:gqa --prompt hi --bits 8 --set window=32 --set when-full=demote": (
        "--set window=32 keeps the last tokens beside compressed ones, and --set when-full demote "
        "stores tokens in two places, too: leave one of them out"
    ),
    "kvfold eval sliding --bits 4 --set window=32": (
        "--set window=32: this model has layers with a sliding window, which exact windows do not "
        "support: leave --set window out"
    ),
    "kvfold eval joint --set window=32": (
        "--set window=32: this model computes compressed keys and values, as its maps are folded "
        "into its weights: leave --set window out, or compress the model without --fold"
    ),
    "kvfold eval reference:gqa --set zeros": (
        "--set zeros is a setting of packed numbers, and with 16 bits none are packed: set "
        "--bits to 8 or fewer, or leave it out"
    ),
    "kvfold eval reference:gqa --set sub-group=32 --bits 16": (
        "--set sub-group is a setting of packed numbers, and with 16 bits none are packed: "
        "set --bits to 8 or fewer, or leave it out"
    ),
    "kvfold eval reference:gqa --set no-rotation": (
        "--set no-rotation is a setting of packed numbers, and with 16 bits none are packed: "
        "set --bits to 8 or fewer, or leave it out"
    ),
    "kvfold eval reference:gqa --set format=kivi": (
        "--set format kivi quantises all numbers, so --bits must be less than 16; none are "
        "given: set --bits to one of 8, 6, 4, 3, 2, 1, or leave --set format out"
    ),
    "kvfold eval reference:gqa --set format=kivi --bits 4 --evict snapkv --keep-tokens 0.5": (
        "--set format kivi and --evict snapkv exclude each other: tokens are packed together "
        "in "
        "their order, so they cannot move to other pages. Leave one of them out"
    ),
    "kvfold eval reference:gqa --evict best --keep-tokens 0.5": (
        f"--evict must be one of {names([*POLICIES, AUTO])}; got 'best'"
    ),
    "kvfold generate reference:gqa --prompt hi --set when-full=demote": (
        "--set when-full demote takes tokens from 8 to 4 bits; none are given: set --bits 8, "
        "or leave --set when-full out"
    ),
    "kvfold eval reference:gqa --evict snapkv": (
        "--evict snapkv needs to know how many tokens to keep: give --keep-tokens, such as "
        "0.5, or --set max-cache-tokens"
    ),
    "kvfold eval reference:gqa --evict snapkv --keep-tokens 1.5": (
        "--keep-tokens must be in (0, 1], got 1.5"
    ),
    "kvfold eval reference:gqa --evict snapkv --set max-cache-tokens=0": (
        "--set max-cache-tokens must be at least 1, got 0"
    ),
    "kvfold eval reference:gqa --evict snapkv --keep-tokens 0.5 --set max-cache-tokens=64": (
        "--set max-cache-tokens=64 and --keep-tokens 0.5 both limit the cache: give one"
    ),
    "kvfold eval reference:gqa --keep-tokens 0.5": (
        "--keep-tokens and --set max-cache-tokens need a policy that says what goes: set "
        "--evict, such as --evict kv-compress"
    ),
    "kvfold eval reference:gqa --set repair": (
        "--set repair refits what stays after an eviction: set --evict too, such as --evict "
        "kvzip-keys, or leave it out"
    ),
    "kvfold eval joint --evict kvzip --keep-tokens 0.5 --set repair": (
        "--set repair: this model's heads share stored numbers, or their keys are reconstructed "
        "before RoPE, so that a head cannot change its entries alone: leave --set repair out, or "
        "use recipe 'fast', 'zack', 'zdc' or 'kvquant-z', or the uncompressed model"
    ),
    "kvfold eval sliding --evict snapkv --keep-tokens 0.5": (
        "--evict snapkv: this model's sliding window already drops old tokens, and eviction "
        "would drop others: leave --evict out"
    ),
}
MEASURING = {
    "kvfold eval reference:gqa --set ctx=0": "--set ctx must be at least 1, got 0",
    "kvfold eval reference:gqa --set ctx=1": (
        "packaged: --set ctx: 1 is too small; a window needs at least 2 tokens"
    ),
    "kvfold eval reference:gqa --set ctx=5000": (
        "--set ctx: 5000 tokens exceed the model's 4096 positions; use 4096 or less"
    ),
    "kvfold eval reference:gqa --set chunk=0": "--set chunk must be at least 1, got 0",
    "kvfold eval reference:gqa --set batch=0": "--set batch must be at least 1, got 0",
    "kvfold eval reference:gqa --max-tokens -5": "--max-tokens must be at least 1, got -5",
    "kvfold eval reference:gqa --max-tokens 64": (
        "packaged: --max-tokens: 64 is less than one window of --set ctx=1024 tokens; take "
        "more, or a smaller --set ctx"
    ),
    "kvfold eval reference:gqa --set see-question": (
        "--set see-question is a setting of --needle: give --needle too, or leave it out"
    ),
    "kvfold eval reference:gqa --set needle-contexts=5": (
        "--set needle-contexts is a setting of --needle: give --needle too, or leave it out"
    ),
    "kvfold eval sliding --needle": (
        "--needle: the model has 256 positions, the shortest context takes 512; leave --needle out"
    ),
    "kvfold bench attention --set rounds=0": "--set rounds must be at least 1, got 0",
    "kvfold bench decode --steps 1": "--steps must be at least 2, got 1",
    "kvfold eval reference:gqa --evict snapkv --keep-tokens 0.5 --set ctx=2": (
        "--set ctx must be at least 3 where tokens are evicted, since the first half of a "
        "window is the prompt and only the rest is scored; got 2"
    ),
    "kvfold bench serve 127.0.0.1:8000 --rate 1": (
        "'127.0.0.1:8000' is no URL; give one such as http://127.0.0.1:8000"
    ),
    "kvfold bench serve http://127.0.0.1:1": (
        "--rate is missing: without the times of a trace it is needed"
    ),
    "kvfold bench serve http://127.0.0.1:1 --rate 1 --bits 4": (
        "--bits is a setting of a server that is started here: give --engine too, or leave it out"
    ),
    "kvfold bench serve http://127.0.0.1:1 --rate 1 --engine vllm": (
        "--engine starts a server for a model: give a model instead of the URL "
        "http://127.0.0.1:1, or leave --engine out"
    ),
    "kvfold bench serve http://127.0.0.1:1 --rate 1 --set result-dir=nowhere": (
        "--set result-dir: nowhere is no folder; create it first"
    ),
    "kvfold bench serve http://127.0.0.1:1 --rate 1,0": "--rate must be above 0; got '1,0'",
    "kvfold bench serve http://127.0.0.1:1 --rate 1 --set max-input=9": (
        "--set max-input needs a --set trace: give one, or leave it out"
    ),
    "kvfold bench serve http://127.0.0.1:1 --rate 1 --set trace=keys.jsonl": (
        "keys.jsonl, line 1: a trace has the fields TIMESTAMP, ContextTokens, "
        "GeneratedTokens; timestamp, input_length, output_length; num_prefill_tokens, "
        "num_decode_tokens; got none of these"
    ),
    "kvfold bench serve http://127.0.0.1:1 --rate 1 --set beside=keys.jsonl": (
        "--set beside: keys.jsonl is not a result of kvfold bench serve; write one with --json"
    ),
    "kvfold bench serve http://127.0.0.1:1 --rate 1 --set plot=a.txt": (
        "--set plot: a.txt must end with .svg, .png or .pdf"
    ),
    "kvfold bench agents http://127.0.0.1:1 --agents 8,4": (
        "--agents must be numbers above 0 that rise; got '8,4'"
    ),
    "kvfold bench agents http://127.0.0.1:1 --longest 4096": (
        "--longest must hold a context and a turn, 10067 tokens; got 4096: raise it, or lower "
        "--set shortest or --set turn-tokens"
    ),
    "kvfold bench agents http://127.0.0.1:1 --longest 4096 --set shortest=1024": (
        "--set shared must be below --set shortest; got 2048 and 1024: lower --set shared"
    ),
    "kvfold advise reference:gqa --gpu h1000": (
        "--gpu must be one of t4, l4, a10g, rtx-4090, a100-40, l40s, a100-80, h100, h200, "
        "b200, or a size such as 24GB or 22.5GiB; got 'h1000'"
    ),
    "kvfold advise reference:gqa --gpu 24": (
        "--gpu must be one of t4, l4, a10g, rtx-4090, a100-40, l40s, a100-80, h100, h200, "
        "b200, or a size such as 24GB or 22.5GiB; got '24'"
    ),
    "kvfold advise reference:gqa --loss 1": (
        "--loss must be the most perplexity to add, such as 1% or 0.5%, or the same as"
        " \"ppl<=1.01\"; got '1'"
    ),
    "kvfold advise reference:gqa --loss 1% --bits 4": (
        "--loss chooses between settings, and here one is named, by an option of the cache, by"
        " maps or by a compressed model: leave --loss out, or name the original model alone"
    ),
    "kvfold advise reference:gqa --sequences 0": "--sequences must be at least 1, got 0",
    "kvfold advise reference:gqa --context 100000": (
        "--context must be at most 4096, the model's positions; got 100000"
    ),
    "kvfold advise reference:gqa --set share=2": "--set share must be in (0, 1], got 2.0",
    "kvfold advise reference:gqa --context 0": "--context must be at least 1, got 0",
    "kvfold advise reference:gqa --evict auto --keep-tokens 0.5": (
        "--evict auto is measured on a model's answers, and this reads its config alone: "
        "name a policy, such as 'kvzip'"
    ),
    "kvfold route localhost": ("'localhost' is no URL; give one such as http://127.0.0.1:8000"),
    "kvfold route http://me:secret@a": (
        "the URL of a has a name or password, which /health and /metrics would show: leave it out; "
        "clients send their keys themselves"
    ),
    "kvfold route http://a http://a": "http://a, http://a: give each server once",
    "kvfold route http://a --pick best": (
        'Invalid value "best" for --pick. Choose from: "shortest", "round-robin".'
    ),
    "kvfold route http://a --set max-body=9": "--set max-body must be at least 1024, got 9",
    "kvfold route http://a --set check-seconds=0": "--set check-seconds must be above 0, got 0.0",
    "kvfold bench attention --batch 1.5": (
        "--batch: '1.5' is not a comma-separated list of numbers such as 1,8"
    ),
}
GENERATING = {
    "kvfold generate reference:gqa --prompt Once --max-new-tokens 2.5": (
        "Invalid value for --max-new-tokens: must be a whole number, got 2.5"
    ),
    "kvfold generate reference:gqa": "give one of --prompt TEXT and --prompt-file FILE",
    r"kvfold generate reference:gqa --prompt $'\xff'": "--prompt: not utf-8 text at character 0",
    "kvfold generate reference:gqa --prompt a --max-new-tokens -5": (
        "--max-new-tokens must be at least 1, got -5"
    ),
    "kvfold generate reference:gqa --prompt a --max-new-tokens 5000": (
        "the prompt's 2 tokens and 5000 new ones exceed the model's 4096 positions; shorten "
        "it or lower --max-new-tokens"
    ),
    "kvfold generate reference:gqa --prompt a --temperature 0": (
        "--temperature must be above 0, got 0.0; leave it out for greedy"
    ),
    "kvfold generate reference:gqa --prompt a --temperature 1 --set top-p=2": (
        "--set top-p must be in (0, 1], got 2.0"
    ),
    "kvfold generate reference:gqa --prompt a --temperature 1 --set top-k=0": (
        "--set top-k must be at least 1, got 0"
    ),
    "kvfold generate reference:gqa --prompt a --set top-k=5": (
        "--set top-k and --set top-p need sampling: give --temperature too"
    ),
    "kvfold generate reference:gqa --prompt a --set seed=-1": (
        "--set seed must be at least 0 and below 9.22337e+18, got -1"
    ),
    "kvfold generate reference:gqa --prompt-file long.txt": (
        "the prompt has more tokens than the model's 4096 positions; shorten it"
    ),
    "kvfold generate reference:gqa --prompt a --set context=none.kvf": (
        "packed context none.kvf: no such file; `kvfold pack` makes one"
    ),
    "kvfold generate reference:gqa --prompt a --set context=none.kvf --bits 4": (
        "the file of --set context sets how the cache stores tokens: of these settings, only "
        "--set kv-bytes can be given with it"
    ),
    "kvfold generate reference:gqa --prompt a --set context=none.kvf --chat": (
        "--chat starts a conversation, but --set context continues one: leave --chat out, "
        "and write the chat template's marks into the prompt"
    ),
    "kvfold pack reference:gqa --context none.txt --output book.kvf": (
        "file none.txt: no such file; give a text file, plain, .xz or .gz"
    ),
    "kvfold pack reference:gqa --context long.txt --output book.kvf": (
        "the context has more tokens than the model's 4096 positions, one of which is needed "
        "for a question; shorten it"
    ),
    "kvfold pack reference:gqa --context text.txt --output nowhere/book.kvf": (
        "cannot write nowhere/book.kvf: folder nowhere does not exist; create it first"
    ),
    "kvfold pack reference:gqa --context text.txt --output book.kvf --set factor=0.5": (
        "--set factor must be at least 1, got 0.5"
    ),
    "kvfold pack sliding --context text.txt --output book.kvf": (
        "--evict kvzip: this model's sliding window already drops old tokens, and eviction would "
        "drop others: leave --evict out"
    ),
}
POOLS = {
    "kvfold generate reference:gqa --prompt hi --bits 4 --set window=32 --set kv-bytes=1000": (
        "--set window=32 takes 917504 bytes for one sequence, and the cache has 1000: raise --set "
        "kv-bytes, or take a shorter --set window"
    ),
    "kvfold generate reference:gqa --prompt a --set kv-bytes=1000": (
        "--set kv-bytes must be at least 458752 to hold a page of each of 14 groups (458752 B, "
        "in slabs of one page size each); got 1000: give the pool more memory, or take "
        "smaller pages"
    ),
    "kvfold eval reference:gqa --bits 4 --set ctx=1024 --max-tokens 1024 --set kv-bytes=300000": (
        "--set kv-bytes: a pool of 299968 bytes has no room for 512 tokens; uncompressed it "
        "holds 160: 3159731 bytes would do, or shorter contexts"
    ),
    "kvfold eval reference:gqa --set kv-bytes=99999999999999": (
        "--set kv-bytes must be at most 137438953472, since tables hold int32 offsets in units "
        "of 64 B; got 99999999999999"
    ),
    "kvfold eval reference:gqa --set page=99999999": (
        "--set page=99999999: pages of so many tokens take more than half of the free memory; use "
        "fewer, or set --set kv-bytes"
    ),
}
MAPS = {
    "kvfold generate reference:gqa --prompt a --maps nowhere": (
        "--maps must be a folder with kvfold.json and kvfold.safetensors, or the hub id of "
        "one, USER/NAME; nowhere has no kvfold.json and no kvfold.safetensors"
    ),
    "kvfold generate reference:gqa --prompt a --maps someone/maps": (
        "--maps: cannot read 'someone/maps': there is no such directory, the hub cannot be "
        "reached, and this machine has no copy of such a hub id: give a directory"
    ),
    "kvfold generate reference:gqa --prompt a --maps folder": (
        "--maps must be a folder with kvfold.json and kvfold.safetensors, or the hub id of "
        "one, USER/NAME; folder has no kvfold.json and no kvfold.safetensors"
    ),
    "kvfold generate reference:gqa --prompt a --maps torn-maps": (
        "--maps: torn-maps is damaged (kvfold.safetensors is not the one that kvfold.json was "
        "written with); copy its files again, or compress again"
    ),
    "kvfold generate reference:gqa --prompt a --maps other-maps": (
        "--maps were made for someone/other, whose hidden_size is 512; this model's is 256: "
        "take the maps of this model"
    ),
    "kvfold generate reference:gqa --prompt a --maps maps --set context=book.kvf": (
        "--maps and --set context exclude each other: a packed context has evicted tokens, "
        "which does not work with maps: leave one out"
    ),
    "kvfold eval compressed --maps maps": (
        "--maps work with an original model, but 'compressed' is compressed already: leave "
        "them out, or name the original"
    ),
    "kvfold eval reference:gqa --maps maps --evict random --keep-tokens .5": (
        "--maps: with maps beside the weights nothing is evicted, and the only format is "
        "'integers': leave --evict, --set repair and --set format out, or fold the maps into "
        "the model (kvfold compress --fold)"
    ),
    "kvfold serve reference:gqa --maps maps --set context=book=book.kvf": (
        "--maps and --set context exclude each other: a packed context has evicted tokens, "
        "which does not work with maps: leave one out"
    ),
    "kvfold serve reference:gqa --maps other-maps --engine vllm": (
        "--maps were made for someone/other, whose hidden_size is 512; this model's is 256: "
        "take the maps of this model"
    ),
    "kvfold compare maps": (
        "maps holds maps for reference:gqa, and kvfold compare compresses a model itself: give"
        " reference:gqa, or measure these maps by kvfold eval maps"
    ),
    "kvfold frontier maps": (
        "maps holds maps for reference:gqa, and kvfold frontier compresses a model itself: give"
        " reference:gqa, or measure these maps by kvfold eval maps"
    ),
    "kvfold advise maps --evict random --keep-tokens .5": (
        "--maps: with maps beside the weights nothing is evicted, and the only format is "
        "'integers': leave --evict, --set repair and --set format out, or fold the maps into "
        "the model (kvfold compress --fold)"
    ),
    "kvfold advise random:tiny --maps maps": (
        "--maps are of a model, and random:tiny has random weights: name the model"
    ),
    "kvfold advise reference:gqa --maps other-maps": (
        "--maps were made for someone/other, whose hidden_size is 512; this model's is 256: "
        "take the maps of this model"
    ),
    "kvfold inspect": "there is nothing to inspect: give MODEL or --maps",
    "kvfold inspect reference:gqa --maps other-maps": (
        "--maps were made for someone/other, whose hidden_size is 512; this model's is 256: "
        "take the maps of this model"
    ),
    "kvfold inspect --maps maps --recipe zack": (
        "--maps and --recipe exclude each other: one shows what is stored, the other plans "
        "something new: leave one out"
    ),
    "kvfold compress reference:gqa --set windows --output folder": (
        "output folder exists and is not an empty directory; name another one"
    ),
    "kvfold push maps": (
        "kvfold push needs NAME. Repository on the hub, USER/NAME. For example: kvfold push maps"
        " USER/NAME"
    ),
    "kvfold push nowhere someone/maps": (
        "folder nowhere does not exist; name one that `kvfold compress` wrote"
    ),
    "kvfold push folder someone/maps": (
        "cannot publish folder: maps must be a folder with kvfold.json and kvfold.safetensors,"
        " or the hub id of one, USER/NAME; folder has no kvfold.json and no kvfold.safetensors"
    ),
    "kvfold push torn-maps someone/maps": (
        "cannot publish torn-maps: maps: torn-maps is damaged (kvfold.safetensors is not the "
        "one that kvfold.json was written with); copy its files again, or compress again"
    ),
    "kvfold push maps someone": (
        "a hub repository is USER/NAME, of letters, digits, -, _ and .; got 'someone'"
    ),
    "kvfold push maps someone/maps": (
        "cannot publish someone/maps: the hub cannot be reached; nothing was published"
    ),
}
PYTHON = {
    'kvfold.recover("reference:gqa", output="new", step=5)': (
        "unknown settings: step; legal: steps, batch, rank, learning_rate, maps, seed"
    ),
    'kvfold.attach(None, "nowhere")': (
        "maps must be a folder with kvfold.json and kvfold.safetensors, or the hub id of one, "
        "USER/NAME; nowhere has no kvfold.json and no kvfold.safetensors"
    ),
    'kvfold.LLM("reference:gqa", maps="nowhere")': (
        "maps must be a folder with kvfold.json and kvfold.safetensors, or the hub id of one, "
        "USER/NAME; nowhere has no kvfold.json and no kvfold.safetensors"
    ),
    'kvfold.compress("reference:gqa", "lorc", max_tokens=4096)': (
        "recipe='lorc' makes no maps beside the weights: add fold=True, which folds it into "
        f"them, or use {WITH_MAPS}"
    ),
    'kvfold.compress("reference:gqa", learn_scores=True)': (
        "learn_scores needs a folded model: add fold=True"
    ),
    "kvfold.LLM(None)": "model must be a name or a loaded causal LM; got None",
    'kvfold.LLM("reference:gqa", max_sequences="4")': (
        "max_sequences must be a whole number; got '4'"
    ),
    'kvfold.best_policy("reference:gqa", None)': (
        "evict='auto' is measured at a budget: give keep_tokens, such as 0.25"
    ),
    'kvfold.LLM("reference:gqa", chunk=0)': "chunk must be at least 1, got 0",
    'kvfold.LLM("reference:gqa", max_tokens=64.5)': "max_tokens must be a whole number; got 64.5",
    'kvfold.LLM("reference:gqa", owned="no")': "owned must be True or False; got 'no'",
    'kvfold.LLM("reference:gqa", prefix_caching="no")': (
        "prefix_caching must be True or False; got 'no'"
    ),
    'kvfold.PackedContext.load("none.kvf")': (
        "packed context none.kvf: no such file; `kvfold pack` makes one"
    ),
    "kvfold serve joint --set shadow=0.1%": (
        "--set shadow compares answers with the model's original attention, which a folded"
        " checkpoint no longer has: serve maps (kvfold compress without --fold), or leave"
        " --set shadow out"
    ),
    'kvfold.LLM("joint", shadow="0.1%")': (
        "shadow compares answers with the model's original attention, which a folded checkpoint no"
        " longer has: serve maps (kvfold compress without fold), or leave shadow out"
    ),
    'kvfold.LLM("reference:gqa", bit=4)': (
        f"unknown settings: bit; of the cache: {names(settings_of(CacheConfig), few=99)}"
    ),
    'kvfold.LLM("nowhere")': (
        "cannot load a model from 'nowhere': there is no such directory, the hub cannot be "
        "reached, and this machine has no copy of such a hub id: give a directory"
    ),
    'kvfold.compress("reference:gqa", keep="0.5")': "keep must be a number; got '0.5'",
    'kvfold.compress("reference:gqa", keep=float("nan"))': (
        "keep must be in (0, 1], got nan; it is the share of the cache to keep"
    ),
    'kvfold.compress("reference:gqa", factor=True)': "factor must be a number; got True",
    'kvfold.compress("reference:gqa", factor=float("inf"))': (
        "factor must be at least 1 and below 1000, got inf"
    ),
    'kvfold.compress("reference:gqa", factor=4, levels=())': (
        "levels must be some of 8, 6, 4, 3, 2, 1; got ()"
    ),
    'kvfold.compress("reference:gqa", factor=4, levels=4)': (
        "levels must be a tuple of whole numbers; got 4"
    ),
    'kvfold.compress("reference:gqa", factor=4, prefer="quick")': (
        "prefer must be one of speed, balanced, size; got 'quick'"
    ),
    'kvfold.compress("reference:gqa", "small", factor=4, prefer="speed")': (
        "prefer='speed' plans a latent of keys per head and one of all heads' values, and "
        "recipe 'small' has others: use swift or lean, or leave prefer out"
    ),
    'kvfold.compress("reference:gqa", keep=0.5, factor=4)': (
        "keep=0.5 and factor=4 exclude each other: each decides the size alone"
    ),
    'kvfold.compress("reference:gqa", recipe=5)': "recipe must be a string or a Recipe; got 5",
    'kvfold.compress("reference:gqa", "tiny")': f"unknown recipe 'tiny'; recipes: {RECIPES}",
    'kvfold.compress("reference:gqa", align="8")': "align must be a whole number; got '8'",
    'kvfold.compress("reference:gqa", max_tokens=2.5)': (
        "max_tokens must be a whole number; got 2.5"
    ),
    'kvfold.compress("reference:gqa", seed=None)': "seed must be a whole number; got None",
    'kvfold.compress("reference:gqa", recover=2.5)': "recover must be a whole number; got 2.5",
    'kvfold.compress("reference:gqa", calib=5)': (
        "calib must be a list of strings or Paths; got 5"
    ),
    'kvfold.compress("reference:gqa", statistics="folder")': "folder is a directory; name a file",
    'kvfold.compress("reference:gqa", output="folder")': (
        "output folder exists and is not an empty directory; name another one"
    ),
    "kvfold.compress(5)": "model must be a name or a loaded causal LM; got 5",
    'Recipe(name="mine", basis="pre_rope", group_size=True)': (
        "group_size must be a whole number, at least 1; got True"
    ),
    'Recipe(name="mine", basis="pre_rope", keys="heads")': (
        "keys must be one of head, group, joint, kv; got 'heads'"
    ),
    'Recipe(name="mine", basis="pre_rope", keys="kv")': (
        "keys='kv' and values='kv' go together: one latent serves both"
    ),
    'CacheConfig(bits="4")': "bits must be one of 16, 8, 6, 4, 3, 2, 1; got '4'",
    "CacheConfig(page=2.5)": "page must be a whole number, at least 1 row; got 2.5",
    'CacheConfig(kv_bytes="1GB")': "kv_bytes must be a whole number, at least 1; got '1GB'",
    "CacheConfig(kv_bytes=True)": "kv_bytes must be a whole number, at least 1; got True",
    "CacheConfig(zeros=1)": "zeros must be True or False; got 1",
    'CacheConfig(evict="snapkv", keep_tokens=float("nan"))': (
        "keep_tokens must be in (0, 1], got nan"
    ),
    "CacheConfig(keep_tokens=0.5)": (
        "keep_tokens and max_cache_tokens need a policy that says what goes: set evict, such "
        "as evict='kv-compress'"
    ),
    'kvfold.load("reference:gqa", dtype="int8")': (
        "dtype must be one of auto, float32, bfloat16, float16, float64; got 'int8'"
    ),
    'kvfold.load("reference:gqa", dtype=16)': (
        "dtype must be one of auto, float32, bfloat16, float16, float64; got 16"
    ),
    'kvfold.load("reference:gqa", device="meta")': (
        "device must be cpu, cuda, cuda:N or mps; got 'meta'"
    ),
    'kvfold.LLM("reference:gqa", dtype="float8")': (
        "dtype must be one of auto, float32, bfloat16, float16, float64; got 'float8'"
    ),
    'kvfold.LLM("reference:gqa", tokenizer=5)': (
        "tokenizer must be one that transformers loaded; got 5"
    ),
    'kvfold.compress("reference:gqa", tokenizer="reference:gqa")': (
        "tokenizer must be one that transformers loaded; got 'reference:gqa'"
    ),
    'kvfold.compress("reference:gqa", align=10**30)': (
        "align must be at least 1 and below 1e+06, got 1000000000000000000000000000000"
    ),
    'kvfold.compress("reference:gqa", output="")': (
        "cannot write .: it is the folder you are in; name one in it"
    ),
    "kvfold.load(None)": "name must be a directory, a GGUF file or a hub id; got None",
    'kvfold.load("reference:gqa", torch_dtype="float16")': (
        "torch_dtype is called dtype here: pass dtype='float16'"
    ),
    'kvfold.parallel.SequenceParallel("reference:gqa")': (
        "model must be a loaded causal LM, such as kvfold.load gives, or a kvfold.LLM; got"
        " 'reference:gqa'"
    ),
}
FULL_DISK = {
    "kvfold eval reference:gqa --set ctx=64 --max-tokens 64 --json new.json": (
        "cannot write new.json: No space left on device"
    ),
    "kvfold inspect reference:gqa --html new.html": (
        "cannot write new.html: No space left on device"
    ),
    "kvfold compress reference:gqa --output new --stats new.safetensors": (
        "cannot write new.safetensors: Error while serializing: No space left on device (os "
        "error 28)"
    ),
    "kvfold compress reference:gqa --fold --recipe lorc --output new": (
        "cannot write new: No space left on device"
    ),
}
NO_MEMORY = {
    "kvfold eval reference:gqa": (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 "
        "GiB of which 1.50 GiB is free: lower --set batch, --set ctx or --set chunk, and "
        "--set kv-bytes of pages"
    ),
    "kvfold generate reference:gqa --prompt a --set kv-bytes=2147483648": (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 "
        "GiB of which 1.50 GiB is free: shorten the prompt, or lower --max-new-tokens, or "
        "--set kv-bytes of pages"
    ),
    "kvfold compress reference:gqa --output new": (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 "
        "GiB of which 1.50 GiB is free: take a smaller model, or --device cpu where that is "
        "an option"
    ),
}
REQUESTS = {
    "llm.generate(5)": "prompts must be a text, token ids or a list of these; got 5",
    'llm.generate({"a": 1})': "prompts must be a text, token ids or a list of these; got {'a': 1}",
    "llm.generate([True, False])": (
        "prompt_ids must be whole numbers, token ids; got [True, False]"
    ),
    "llm.generate([5.9])": "prompt_ids must be whole numbers, token ids; got [5.9]",
    'llm.generate("a", context="book.kvf")': (
        "context must be a PackedContext, of LLM.pack or PackedContext.load; got 'book.kvf'"
    ),
    "llm.pack('The ship.', factor=0)": "factor must be at least 1, got 0",
    "llm.pack([5] * 300)": (
        "the context has 300 tokens, and max_tokens is 256, for context and question: shorten the "
        "context, or raise max_tokens if the model has more positions"
    ),
    "llm.generate([[]])": "prompt_ids must hold at least 1 token; got none",
    "llm.generate([[1, 999999]])": "prompt: token ids must be in 0..4095; got 999999",
    "llm.generate([[5] * 300])": (
        "the prompt has 300 tokens, and max_tokens is 256: shorten the prompt, or raise max_tokens "
        "if the model has more positions"
    ),
    "llm.generate('a ' * 10**5)": (
        "the prompt has over 256 tokens, and max_tokens is 256: shorten the prompt, or raise "
        "max_tokens if the model has more positions"
    ),
    'llm.generate("a", SamplingParams(min_tokens=2, allowed_token_ids=[0]))': (
        "allowed_token_ids, min_tokens: together they leave no token that may come after 0: allow "
        "more, or leave one of them out"
    ),
    'llm.generate("a", SamplingParams(allowed_token_ids=[5], bad_words=["%"]))': (
        "allowed_token_ids, bad_words: together they leave no token that may come after 0: allow "
        "more, or leave one of them out"
    ),
    "llm.generate([[5] * 65])": (
        "kv_bytes: a pool of 1048576 bytes holds 64 tokens of a sequence, and this request starts "
        "with 66: use 2493644 bytes, or shorten the prompt"
    ),
    'llm.generate(["a", "b"], [SamplingParams()])': (
        "sampling must be one for all prompts, or one each; got 1 for 2"
    ),
    'llm.generate("a", {"temperature": 1.0})': (
        "sampling must be a SamplingParams; got {'temperature': 1.0}"
    ),
    'llm.generate("a", cache=CacheParams(keep_tokens=0.5))': (
        "cache=CacheParams(max_cache_tokens=None, keep_tokens=0.5, protected=None, every=None) "
        "limits what a request keeps, but this LLM evicts nothing: give it a policy, such as "
        "evict='kv-compress'"
    ),
    'llm.chat("Who went to sea?")': (
        "the tokenizer has no chat template: this model continues text only"
    ),
    "llm.stream([-1])": "prompt: token ids must be in 0..4095; got -1",
    'SamplingParams(stop=["zzz", 5])': "stop must be a tuple of strings; got ['zzz', 5]",
    'SamplingParams(stop="")': "stop must be strings that are not empty; got ('',)",
    "SamplingParams(max_new_tokens=2.5)": (
        "max_new_tokens must be a whole number, at least 1; got 2.5"
    ),
    "SamplingParams(temperature=-1)": "temperature must be at least 0, got -1",
    'SamplingParams(temperature=float("nan"))': "temperature must be at least 0, got nan",
    "SamplingParams(top_p=0)": "top_p must be in (0, 1], got 0",
    "SamplingParams(seed=2**63)": (
        "seed must be at least 0 and below 9.22337e+18, got 9223372036854775808"
    ),
    "CacheParams(keep_tokens=0.5, max_cache_tokens=64)": (
        "max_cache_tokens=64 and keep_tokens=0.5 both limit the cache: give one"
    ),
    "CacheParams(max_cache_tokens=8, protected=9)": (
        "protected must be at most max_cache_tokens=8; got 9"
    ),
    "CacheParams(max_cache_tokens=64, every=0)": "every must be at least 1, got 0",
    r'llm.generate("a\ud800")': "prompt: not utf-8 text at character 1",
    r'llm.generate("a", SamplingParams(bad_words=["\ud800"]))': (
        "bad_words: not utf-8 text at character 0"
    ),
    r'llm.pack("a\ud800")': "text: not utf-8 text at character 1",
    r'CacheParams(cache_salt="\ud800")': "cache_salt: not utf-8 text at character 0",
}
CHECKPOINTS = {
    "kvfold recover folded --original reference:mha --output new": (
        "reference:mha has another shape: --original is what it was made from"
    ),
    "kvfold recover folded --original quarter --output new": (
        "quarter is compressed, too: --original is what it was made from"
    ),
    "kvfold eval no-tensor": (
        "cannot load a model from 'no-tensor': tensors 1 missing "
        "(model.layers.1.mlp.up_proj.weight); its files are incomplete or not of one checkpoint: "
        "copy all of them again"
    ),
    "kvfold eval other-weights": (
        "cannot load a model from 'other-weights': tensors 27 of another shape "
        "(model.layers.0.self_attn.down_proj.bias, model.layers.0.self_attn.down_proj.weight, "
        "model.layers.0.self_attn.key_up, ...); its files are incomplete or not of one "
        "checkpoint: copy all of them again"
    ),
    "kvfold eval edited-weights": (
        "the weights in edited-weights are not those that its config.json was saved with, or one "
        "of them was edited: put the files of one compression together"
    ),
    "kvfold eval no-section": (
        "cannot load a model from 'no-section': tensors 13 missing "
        "(model.layers.0.self_attn.k_proj.weight, model.layers.1.self_attn.k_proj.weight, "
        "model.layers.1.self_attn.v_proj.weight, ...); 7 of another shape "
        "(model.layers.0.self_attn.o_proj.weight, model.layers.0.self_attn.v_proj.weight, "
        "model.layers.1.self_attn.o_proj.weight, ...); 42 unexpected "
        "(model.layers.0.self_attn.down_proj.bias, model.layers.0.self_attn.down_proj.weight, "
        "model.layers.0.self_attn.key_mean, ...); this looks like a kvfold checkpoint whose "
        "quantization_config was removed from config.json: put it back, or compress the model "
        "again"
    ),
    "kvfold eval reversed": (
        "cache.layers[0].latents must be of keys (k), then of values (v), or of both (kv); got v,"
        " k: config.json was edited, or written by another version of kvfold; compress the model "
        "again"
    ),
    "kvfold eval twice": (
        "cache.layers[0].latents must have keys of heads 0..1, each once, in order; got [0, 1, "
        "0]: config.json was edited, or written by another version of kvfold; compress the model "
        "again"
    ),
    "kvfold eval rank-32.7": (
        "cache.layers[0].latents[0].rank must be an integer in 0..256; got 32.7: config.json was "
        "edited, or written by another version of kvfold; compress the model again"
    ),
    "kvfold eval fewer-layers": (
        "cache.layers must be 7 layers; got 6: config.json was edited, or written by another "
        "version of kvfold; compress the model again"
    ),
    "kvfold eval no-tiers": (
        "cache.layers[0].latents[0].tiers must be tiers whose numbers add up to rank 256; got []:"
        " config.json was edited, or written by another version of kvfold; compress the model "
        "again"
    ),
    "kvfold eval nan": (
        "the weights in nan are not those that its config.json was saved with, or one of them was "
        "edited: put the files of one compression together"
    ),
    "kvfold compress large-scores --output new": (
        "the attention of layer 2 gives numbers that are not finite in float32: the model "
        "overflows by itself, before anything is compressed; use another checkpoint"
    ),
    "kvfold compress large-values --output new --dtype float16": (
        "the attention of layer 4 gives numbers that are not finite in float16: the model "
        "overflows by itself, before anything is compressed; load it with dtype float32, or use "
        "another checkpoint"
    ),
    "kvfold generate large-values --prompt 'The old house' --bits 8 --dtype float16": (
        "the attention of layer 4 gives numbers that are not finite in float16 on cpu, as tokens "
        "are decoded through the cache; load it with dtype float32, or use another checkpoint. If "
        "the original model runs in this dtype, set KVFOLD_BACKEND=reference and report it"
    ),
    "kvfold eval gptq": (
        "cannot load a model from 'gptq': GPTQConfig.__init__() missing 1 required positional "
        "argument: 'bits'"
    ),
    "kvfold eval ends": (
        "generation_config.json of 'ends': eos_token_id must be a whole number or a list of "
        "whole numbers; got 'end'; copy it again"
    ),
    'kvfold.load("folded", bogus=1)': (
        "cannot load a model from 'folded': LlamaForCausalLM.__init__() got an unexpected "
        "keyword argument 'bogus'"
    ),
}
