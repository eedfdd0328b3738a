"""A live page of a server: one file, which reads /metrics and what of which request is kept."""

from typing import Any

from fastapi import FastAPI
from starlette.responses import HTMLResponse

from kvfold.engine.api.llm import LLM
from kvfold.engine.requests.request import Request
from kvfold.server.errors import APIError
from kvfold.utils.text import packaged

MOST = 200  # requests that are listed
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; connect-src 'self'; img-src data:; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI, llm: LLM) -> None:
    """`/`, and `/requests`, which it asks."""

    @app.get("/")
    async def page() -> HTMLResponse:
        return HTMLResponse(packaged("live.html"), headers=HEADERS)

    @app.get("/requests")
    async def requests() -> dict[str, Any]:
        scheduler = llm.engine.scheduler
        found = [*tuple(scheduler.running), *tuple(scheduler.waiting)]
        return {"requests": [describe(llm, request) for request in found[:MOST]]}

    @app.get("/requests/{id}")
    async def kept(id: int) -> dict[str, Any]:
        for request in tuple(llm.engine.scheduler.running):
            if request.id == id and (rows := kept_rows(llm, request)):
                return describe(llm, request) | {"rows": rows}
        raise APIError(404, f"request {id} does not run, or not any more", param="id")


def describe(llm: LLM, request: Request) -> dict[str, Any]:
    """computed: tokens that went through the model; kept: rows that are stored of them, averaged
    over groups of heads. No text."""
    lengths = _lengths(llm, request)
    return {
        "id": request.id,
        "status": request.status.value,
        "prompt": request.num_prompt,
        "outputs": request.num_outputs,
        "computed": request.num_computed,
        "kept": 0.0 if lengths is None else float(lengths.mean()),
    }


def kept_rows(llm: LLM, request: Request) -> list[list[int]] | None:
    """Rows that every layer stores for each KV head [layers, Hk]; None where it has no slot now."""
    lengths, layout = _lengths(llm, request), llm.runner.pool.layout
    if lengths is None:
        return None
    geometry = layout.spec.geometry
    found = [[0] * geometry.num_kv_heads for _ in range(geometry.num_layers)]
    for group, rows in zip(layout.groups, lengths.tolist(), strict=True):
        for head in group.heads:
            found[group.layer][head] = rows
    return found


def _lengths(llm: LLM, request: Request) -> Any:
    """Rows of every group [G]. The engine goes on meanwhile: they are of this step or the next."""
    slot = request.slot
    return None if slot is None else llm.runner.pool.host_lengths[slot].copy()
