"""The dashboard at `/`: one HTML file that polls /metrics, and /requests for the tokens kept per
layer and head."""

from typing import Any

from fastapi import FastAPI
from starlette.responses import HTMLResponse

from kvfold.engine.api.llm import LLM
from kvfold.engine.requests.request import Request
from kvfold.server.errors import APIError
from kvfold.utils.text import packaged

MAX_LISTED = 200  # most requests in the list
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; connect-src 'self'; img-src data:; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
}


def add_dashboard(app: FastAPI, llm: LLM) -> None:
    """Add `/`, and `/requests`, which the page reads."""

    @app.get("/")
    async def page() -> HTMLResponse:
        return HTMLResponse(packaged("live.html"), headers=HEADERS)

    @app.get("/requests")
    async def requests() -> dict[str, Any]:
        scheduler = llm.engine.scheduler
        listed = [*tuple(scheduler.running), *tuple(scheduler.waiting)][:MAX_LISTED]
        return {"requests": [describe(llm, request) for request in listed]}

    @app.get("/requests/{id}")
    async def request_by_id(id: int) -> dict[str, Any]:
        for request in tuple(llm.engine.scheduler.running):
            if request.id == id and (rows := stored_lengths(llm, request)):
                return describe(llm, request) | {"rows": rows}
        raise APIError(404, f"request {id} is not running", param="id")


def describe(llm: LLM, request: Request) -> dict[str, Any]:
    """A request's state, without its text.

    computed: tokens that went through the model.
    kept: tokens of them that are stored, averaged over groups of heads.
    """
    lengths = _lengths(llm, request)
    return {
        "id": request.id,
        "status": request.status.value,
        "prompt": request.num_prompt,
        "outputs": request.num_outputs,
        "computed": request.num_computed,
        "kept": 0.0 if lengths is None else float(lengths.mean()),
    }


def stored_lengths(llm: LLM, request: Request) -> list[list[int]] | None:
    """Tokens stored per layer and KV head [layers, Hk]; None if the request has no slot."""
    lengths, layout = _lengths(llm, request), llm.runner.pool.layout
    if lengths is None:
        return None
    geometry = layout.spec.geometry
    table = [[0] * geometry.num_kv_heads for _ in range(geometry.num_layers)]
    for group, length in zip(layout.groups, lengths.tolist(), strict=True):
        for head in group.heads:
            table[group.layer][head] = length
    return table


def _lengths(llm: LLM, request: Request) -> Any:
    """Tokens stored in every group [G], before or after the engine's current step."""
    slot = request.slot
    return None if slot is None else llm.runner.pool.host_lengths[slot].copy()
