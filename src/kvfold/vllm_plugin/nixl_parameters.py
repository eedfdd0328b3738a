"""Whether a request's `kv_transfer_params` can name blocks that another server holds for it.

vLLM takes them as they are (0.25.1 and 0.32): with some its engine stops at an assertion, with
others the request waits forever, or other blocks are copied. Imports neither torch nor vLLM.
"""

from array import array
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

# Added by the server that holds the blocks. A proxy may drop them: then they are not compared.
EXPIRY = "kvfold_expires"  # seconds since 1970, until when requests for the blocks must have come
DIGEST = "kvfold_digest"  # of the prompt and its blocks
TYPES = {
    "remote_engine_id": (str, "a string"),
    "remote_request_id": (str, "a string"),
    "remote_host": (str, "a string"),
    "remote_port": (int, "an integer"),
}


def digest(params: dict[str, Any], prompt: Sequence[int]) -> str:
    """Of which prompt a server holds which blocks. prompt: its tokens."""
    ids = [list(group) for group in params["remote_block_ids"]]
    named = repr((params["remote_engine_id"], params["remote_request_id"], ids))
    return sha256(named.encode() + array("q", prompt).tobytes()).hexdigest()[:32]


def parameters_problem(
    params: Any,
    prompt: Sequence[int] | None,
    num_blocks: Sequence[int],
    engine_id: str,
    tp_size: int,
    now: float,
) -> str | None:
    """What is wrong with the parameters, and what would be right; None if they may be used.

    prompt: the tokens whose blocks are wanted; None if they are only given back. num_blocks: of
    each group of layers, those that the prompt fills. engine_id, tp_size: of this server. now: in
    seconds since 1970.
    """
    if not isinstance(params, dict):
        return f"they must be an object; got {short(params)}"
    ids = params.get("remote_block_ids")
    if not params.get("do_remote_prefill"):
        if params.get("do_remote_decode") and ids:
            return "`remote_block_ids` must be left out where this server computes the prompt"
        return None
    for name, (kind, words) in TYPES.items():
        if type(params.get(name)) is not kind:
            return f"`{name}` must be {words}; got {short(params.get(name))}"
    if params["remote_engine_id"] == engine_id:
        return "`remote_engine_id` must be another server's; got this one's"
    for name, size in {"tp_size": tp_size, "pp_size": 1, "dcp_size": 1}.items():
        value = params.get(name, 1)
        if type(value) is not int or value != size:
            return f"`{name}` must be {size}, as it is here; got {short(value)}"
    groups = ids if isinstance(ids, list | tuple) else ()
    lists = [x if isinstance(x, list | tuple) else () for x in groups]
    if [len(x) for x in lists] != list(num_blocks) and (prompt is not None or not any(lists)):
        return (
            f"`remote_block_ids` must be lists of {', '.join(map(str, num_blocks))} numbers for"
            f" this prompt, as the other server returned them; got {short(ids)}"
        )
    if any(type(x) is not int or not 0 <= x < 2**31 for group in lists for x in group):
        return f"`remote_block_ids` must be numbers of blocks; got {short(ids)}"
    if prompt is None:
        return None
    if params.get(DIGEST) not in (None, digest(params, prompt)):
        return "they are of another prompt, or were changed on their way"
    expires = params.get(EXPIRY)
    if isinstance(expires, int | float) and now >= expires:
        return (
            "they came too late, and the other server may have given the blocks to other requests:"
            " send requests on at once, or raise its kv_lease_duration"
        )
    return None


def short(value: Any) -> str:
    """A value for a message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
