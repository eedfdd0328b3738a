"""The routes."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

import kvfold
from kvfold.engine.async_llm import AsyncLLM
from kvfold.engine.packed import PackedContext
from kvfold.server.errors import APIError, from_value_error, install
from kvfold.server.guard import Guard, unless_gone
from kvfold.server.limits import Limits
from kvfold.server.page import add_page
from kvfold.server.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from kvfold.server.replies import ChatReply, CompletionReply, Reply
from kvfold.server.service import Service

NO_CACHE = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def create_app(
    llm: AsyncLLM,
    name: str,
    *,
    limits: Limits | None = None,
    api_key: str | None = None,
    contexts: Mapping[str, PackedContext] | None = None,
) -> FastAPI:
    """An ASGI application that serves `llm` under `name`, and closes it at its end.

    api_key: what clients must send, except to ask for /health and the page, which asks for it.
    contexts: what completions may begin with, by name. Raises ValueError for one that `llm` cannot
    take.
    """
    limits = limits or Limits()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with llm:
            yield

    app = FastAPI(
        title="kvfold", version=kvfold.__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    app.add_middleware(Guard, limits=limits, key=api_key)
    install(app)
    app.add_exception_handler(ValueError, _refused)
    service = Service(llm, name, limits, contexts or {})
    _add_generation(app, service)
    _add_rest(app, service)
    add_page(app, llm.llm)
    return app


async def _refused(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ValueError)
    return from_value_error(error).response


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionBody) -> Response:
        service.check_model(body.model)
        sampling, prompts = body.sampling(service.limits), body.prompts
        asked = [(prompt, params, body.cache) for prompt in prompts for params in sampling]
        echoed = [service.text_of(prompt) for prompt in prompts] if body.echo else []
        choices = await service.open(asked, service.context(body.context))
        return await _answer(request, CompletionReply(service, body, choices, echoed))

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatBody) -> Response:
        service.check_model(body.model)
        sampling = body.sampling(service.limits)
        prompt = await service.encode_chat(body.turns, body.chat_template_kwargs)
        choices = await service.open([(prompt, params, body.cache) for params in sampling])
        return await _answer(request, ChatReply(service, body, choices))


async def _answer(request: Request, reply: Reply) -> Response:
    if reply.body.stream:
        return StreamingResponse(reply.events(), media_type="text/event-stream", headers=NO_CACHE)
    return JSONResponse(await unless_gone(request, reply.whole()))


def _add_rest(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return service.card

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise APIError(400, "give one of prompt and messages", param="prompt")
        return await service.tokenize(body)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        service.check_model(body.model)
        return {"prompt": service.text_of(body.tokens)}

    @app.get("/health")
    async def health() -> dict[str, str]:
        if service.llm.fault is not None:
            raise APIError(503, f"the engine failed: {service.llm.fault}", code="engine_fault")
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text, media_type=CONTENT_TYPE_LATEST)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": kvfold.__version__}
