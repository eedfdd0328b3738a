"""Plain text in, token windows out: the only place that reads text.

Shape legend: n windows, T tokens of a window (`ctx`).
"""

import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import resources
from inspect import signature
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.utils.bounded import bounded
from kvfold.utils.errors import SettingError

if TYPE_CHECKING:
    from torch import Tensor

SEPARATOR = "<|endoftext|>"
ROLES = ("system", "user", "assistant")
CHARACTERS_PER_TOKEN = 6  # first guess of how much text fills a number of tokens
MOST_TEXT = 2**30  # bytes of a text file, unpacked
MOST_JSON = 2**26  # bytes of a JSON object, which takes up to some twenty times as much in memory
TEMPLATE_SECONDS, TEMPLATE_BYTES = 10.0, 2**30  # that writing a conversation may take
# Before a chat template, so that it is none of those that transformers has compiled for others.
COMMENT = "{# kvfold +#}"
_CHUNK = 2**20
_OPEN: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}
_NOT_JSON = {  # what is wrong with a JSON text, by what reading it raises
    json.JSONDecodeError: "not a JSON object",
    RecursionError: "nested too deeply",
    UnicodeDecodeError: "not utf-8 text",
    UnicodeEncodeError: "holds half a character, a surrogate without the other",
    ValueError: "holds a number of thousands of digits",
}


def packaged(name: str) -> str:
    """A text that ships with kvfold, such as `calibration.txt`."""
    return resources.files("kvfold.data").joinpath(name).read_text(encoding="utf-8")


def read_text(path: str | Path) -> str:
    """Whole text of one utf-8 file, unpacked if its name ends in .xz or .gz, with lines that end as
    on Unix.

    Raises ValueError for a file that is missing, damaged, not utf-8 text, blank or larger than
    MOST_TEXT, of which no more than that is unpacked.
    """
    path = Path(path)
    if not path.is_file():
        wrong = "not a regular file" if path.exists() else "no such file"
        raise ValueError(f"file {path}: {wrong}; give a text file, plain, .xz or .gz")
    try:
        text = _content(path).decode("utf-8-sig")
    except (lzma.LZMAError, zlib.error, EOFError, OSError) as error:
        raise ValueError(f"file {path}: cannot be read ({error})") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"file {path}: not utf-8 text at byte {error.start}") from None
    if "\0" in text:
        raise ValueError(f"file {path}: not text (it contains zero bytes)")
    if not text.strip():
        raise ValueError(f"file {path}: empty")
    return text.replace("\r\n", "\n")


def _content(path: Path) -> bytes:
    """The bytes of a file, unpacked. Raises ValueError for more than MOST_TEXT."""
    with _OPEN.get(path.suffix, open)(path, "rb") as file:
        chunks = iter(partial(file.read, _CHUNK), b"")
        content = b"".join(islice(chunks, MOST_TEXT // _CHUNK + 1))
    if len(content) > MOST_TEXT:
        raise ValueError(f"file {path}: more than {MOST_TEXT} bytes of text; split it")
    return content


def numbered_lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file that are not blank, with their numbers from 1, one at a time: lists
    of many short ones are large. Raises as `read_text`."""
    lines = StringIO(read_text(path), newline="\n")
    return ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def json_object(text: str | bytes) -> dict[str, Any]:
    """The object that a JSON text, utf-8 if bytes, holds. Raises ValueError with what is wrong."""
    if len(text) > MOST_JSON:
        raise ValueError(f"larger than {MOST_JSON} bytes")
    try:
        found = json.loads(text if isinstance(text, str) else text.decode())
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(_NOT_JSON[type(error)]) from error
    if not isinstance(found, dict):
        raise ValueError(_NOT_JSON[json.JSONDecodeError])
    return found


def check_text(name: str, text: str) -> None:
    """Raises SettingError for a setting that is no text for a tokenizer: half a character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SettingError(f"`{name}`: not utf-8 text at character {error.start}") from None


def check_tokenizer(tokenizer: Any) -> None:
    """Raises SettingError for what is no tokenizer of transformers'; None: there is none."""
    if tokenizer is not None and not hasattr(tokenizer, "bos_token_id"):
        raise SettingError(
            f"`tokenizer` must be one that transformers loaded; got {tokenizer!r:.100}"
        )


def read_texts(paths: str | Path | Iterable[str | Path]) -> str:
    """Texts of one or more files as documents, in order. Raises as `read_text`."""
    if isinstance(paths, str | Path):
        paths = [paths]
    texts = [read_text(path) for path in paths]
    if not texts:
        raise ValueError("text files: none given; give at least one .txt or .txt.xz file")
    return f"\n{SEPARATOR}\n".join(texts)


def documents(text: str) -> list[str]:
    """The non-empty documents of a text, separated by lines `<|endoftext|>`."""
    return [part.strip() for part in text.split(SEPARATOR) if part.strip()]


def running(text: str) -> str:
    """The documents of a text with a blank line between them: text for any tokenizer."""
    return "\n\n".join(documents(text))


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of `text`, without special tokens or transformers' warning about its length."""
    check_text("text", text)
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def encode_all(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text as `encode` gives them, in one call, which takes a fraction of the
    time."""
    for text in texts:
        check_text("text", text)
    if not texts:
        return []
    return list(tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"])


def check_ids(ids: Iterable[int], num_embeddings: int) -> None:
    """Raises ValueError for a token that a model has no embedding of."""
    highest = max(ids, default=0)
    if highest >= num_embeddings:
        raise ValueError(
            f"the tokenizer gives token {highest}, but the model has embeddings of tokens 0 to"
            f" {num_embeddings - 1} only: they do not belong together, take the model's own"
        )


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """Token ids of `text` as `tokenizer(text)` gives them: its post-processor alone decides which
    special tokens come with them, as in transformers and vLLM."""
    check_text("text", text)
    return list(tokenizer(text, verbose=False)["input_ids"])


def leading_tokens(tokenizer: Any) -> list[int]:
    """Special tokens that the tokenizer itself puts in front of a text, such as BOS.

    Empty where it puts none there, whether it has a BOS token or not.
    """
    text, whole = encode(tokenizer, "a"), encode_prompt(tokenizer, "a")
    starts = range(len(whole) - len(text) + 1)
    return whole[: next(i for i in starts if whole[i : i + len(text)] == text)]


def encode_start(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a `text` that other tokens will follow: special tokens in front, none behind."""
    return [*leading_tokens(tokenizer), *encode(tokenizer, text)]


def encode_chat(
    tokenizer: Any, messages: str | Sequence[Mapping[str, str]], /, **variables: Any
) -> list[int]:
    """Token ids of a conversation by the tokenizer's chat template, as of `render_chat`."""
    return encode(tokenizer, render_chat(tokenizer, messages, **variables))


def render_chat(
    tokenizer: Any,
    messages: str | Sequence[Mapping[str, str]],
    /,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    **variables: Any,
) -> str:
    """A conversation as the tokenizer's chat template writes it; the answer comes next.

    messages: {"role": one of ROLES, "content": text} each, or one user's text.
    add_generation_prompt: end where the answer begins; continue_final_message: inside the last
    message, in place of that. variables: of the template, such as `enable_thinking`; a parameter of
    the tokenizer's method is none. Raises ValueError for anything else, a tokenizer without a chat
    template, what the template refuses, and what is no text (SettingError; variables are
    `chat_template_kwargs` there).
    """
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template: this model continues text only")
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    _check_messages(messages)
    for text in _texts(variables):
        check_text("chat_template_kwargs", text)
    known = signature(tokenizer.apply_chat_template).parameters.keys() | {"messages"}
    if taken := variables.keys() & known:
        raise ValueError(f"{min(taken)} is no variable of a chat template; leave it out")
    how = {
        "add_generation_prompt": add_generation_prompt and not continue_final_message,
        "continue_final_message": continue_final_message,
    }
    return apply_template(tokenizer, [dict(x) for x in messages], **how, **variables)


def apply_template(tokenizer: Any, messages: Sequence[Mapping[str, str]], **how: Any) -> str:
    """What a tokenizer's chat template writes. Raises ValueError for whatever it raises, which of a
    template with a mistake in it is any class of error, and for one that does not end."""
    try:
        from transformers.utils import chat_template_utils  # with jinja2, which texts do without

        from kvfold.utils.template_sandbox import bounded_templates

        def write() -> str:
            template = COMMENT + tokenizer.get_chat_template()
            settings = {"chat_template": template, "tokenize": False} | how
            return str(tokenizer.apply_chat_template(messages, **settings))

        with bounded_templates(chat_template_utils):  # outside of what may end at any step
            return bounded(TEMPLATE_SECONDS, TEMPLATE_BYTES, write)
    except Exception as error:
        why = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(f"messages: the model's chat template refuses them: {why}") from error


def reply_words(tokenizer: Any) -> str:
    """What stands between a user's words and the answer in the tokenizer's chat template; a new
    line where it has none, or where the template puts the words elsewhere."""
    mark = "\x00"
    if not tokenizer.chat_template:
        return "\n"
    asked = [{"role": "user", "content": mark}]
    _, _, found = apply_template(tokenizer, asked, add_generation_prompt=True).partition(mark)
    return found or "\n"


def _check_messages(messages: Any) -> None:
    legal = f'{{"role": {" or ".join(ROLES)}, "content": text}}'
    if not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"messages must be a text or a list of {legal}; got {messages!r}")
    for number, message in enumerate(messages):
        if (
            not isinstance(message, Mapping)
            or message.get("role") not in ROLES
            or not isinstance(message.get("content"), str)
        ):
            raise ValueError(f"messages[{number}] must be {legal}; got {message!r}")
        check_text("content", message["content"])


def _texts(inside: Any) -> Iterator[str]:
    """Every text in mappings and lists, however deep."""
    rest = [inside]
    while rest:
        found = rest.pop()
        if isinstance(found, str):
            yield found
        elif isinstance(found, Mapping):
            rest += [*found, *found.values()]
        elif isinstance(found, list | tuple):
            rest += found


def most_characters(limit: int) -> int:
    """Characters that a text of `limit` tokens may have: no text that says something has as many.
    Tokenising more would hold others for seconds, as of white space."""
    return max(2**20, 16 * limit)


def surely_longer(tokenizer: Any, text: str, limit: int) -> bool:
    """Whether a text that may be long has more than `limit` tokens. False without a look, of one
    that is soon tokenised whole."""
    return len(text) > limit * CHARACTERS_PER_TOKEN and longer(tokenizer, text, limit)


def longer(tokenizer: Any, text: str, limit: int) -> bool:
    """Whether `text` has more than `limit` tokens, of which no more than it takes are made."""
    return len(_encode_prefix(tokenizer, text, limit + 1)) > limit


def windows(tokenizer: Any, text: str, ctx: int, max_tokens: int | None = None) -> "Tensor":
    """Cut `text` into int64 windows [n, ctx] that do not overlap; the remainder is dropped.

    Each window begins with the tokenizer's `leading_tokens`; the rest of it is text.
    `max_tokens` bounds n * ctx. Only as much text as needed is tokenised. Raises ValueError if not
    one window can be filled.
    """
    leading = leading_tokens(tokenizer)
    least = max(2, len(leading) + 1)
    if ctx < least:
        raise SettingError(f"`ctx`: {ctx} is too small; a window needs at least {least} tokens")
    if max_tokens is not None and max_tokens < ctx:
        raise SettingError(
            f"`max_tokens`: {max_tokens} is less than one window of `ctx={ctx}` tokens; take more,"
            " or a smaller `ctx`"
        )
    stride = ctx - len(leading)
    limit = None if max_tokens is None else max_tokens // ctx * stride
    ids = _encode_prefix(tokenizer, text, limit)
    num_windows = len(ids) // stride
    if num_windows == 0:
        raise SettingError(
            f"{len(ids)} tokens are available but one window of `ctx={ctx}` needs {stride};"
            " give more `text` or a smaller `ctx`"
        )
    import torch  # here, as the command line's help needs texts but no tensors

    rows = torch.tensor(ids[: num_windows * stride], dtype=torch.long).view(num_windows, stride)
    return torch.cat([rows.new_tensor(leading).expand(num_windows, -1), rows], dim=1)


def _encode_prefix(tokenizer: Any, text: str, limit: int | None) -> list[int]:
    """First `limit` ids (None: all) of `text`, as tokenising the whole of it gives them."""
    if limit is None:
        return encode(tokenizer, text)
    characters = limit * CHARACTERS_PER_TOKEN
    while True:
        ids = encode(tokenizer, text[:characters])
        # Ids near a cut may differ from those of the whole text, so they are never used.
        if characters >= len(text) or len(ids) >= limit + 64:
            return ids[:limit]
        characters *= 2
