"""The routes."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from email.message import Message
from typing import Annotated, Any

import msgspec
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

import kvfold
from kvfold.engine.api.async_llm import AsyncLLM
from kvfold.engine.requests.packed import PackedContext
from kvfold.server.dashboard import add_page
from kvfold.server.errors import APIError, from_value_error, install
from kvfold.server.guard import Guard, HeadAsGet, unless_gone
from kvfold.server.limits import Limits
from kvfold.server.protocol import (
    B,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    decode,
    whole,
)
from kvfold.server.request_log import note_reply
from kvfold.server.responses import ChatReply, CompletionReply, Reply
from kvfold.server.service import Choices, Echo, Service

NO_CACHE = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def create_app(
    llm: AsyncLLM,
    name: str,
    *,
    limits: Limits | None = None,
    api_key: str | None = None,
    contexts: Mapping[str, PackedContext] | None = None,
    allow_origins: Sequence[str] = (),
) -> FastAPI:
    """An ASGI application that serves `llm` under `name`, and closes it at its end.

    api_key: what clients must send, except to ask for /health, /docs and the page, which asks for
    it. contexts: what completions may begin with, by name. allow_origins: of web pages that may ask
    ("*": of all). Raises ValueError for a context that `llm` cannot take.
    """
    limits = limits or Limits()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with llm:
            yield

    app = FastAPI(title="kvfold", version=kvfold.__version__, lifespan=lifespan, redoc_url=None)
    app.add_middleware(HeadAsGet)
    app.add_middleware(Guard, limits=limits, key=api_key)
    if allow_origins:  # around the guard, since a browser reads refusals by it too
        app.add_middleware(
            CORSMiddleware, allow_origins=allow_origins, allow_methods=["*"], allow_headers=["*"]
        )
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


def _body(kind: type[B]) -> Callable[[Request], Awaitable[B]]:
    """Reads a body of a kind. No other content type than JSON's is taken: a web page may send
    those anywhere without asking."""

    async def read(request: Request) -> B:
        header = Message()
        header["content-type"] = request.headers.get("content-type", "")
        subtype = header.get_content_subtype()
        if header.get_content_maintype() != "application" or (
            subtype != "json" and not subtype.endswith("+json")
        ):
            raise APIError(400, "the body must be a JSON object, sent as application/json")
        # Unlike `request.body()`, the request does not keep it.
        return decode(kind, b"".join([part async for part in request.stream()]))

    return read


def _described(kind: type[Body]) -> dict[str, Any]:
    """A body for /docs."""
    (schema,), parts = msgspec.json.schema_components([whole(kind)], ref_template="#/$defs/{name}")
    name = schema["$ref"].rpartition("/")[2]
    content = {"schema": _inlined(parts[name], parts)}
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


def _inlined(schema: Any, parts: Mapping[str, Any]) -> Any:
    """A schema with what it refers to in its place."""
    if isinstance(schema, dict) and "$ref" in schema:
        return _inlined(parts[schema["$ref"].rpartition("/")[2]], parts)
    if isinstance(schema, dict):
        return {name: _inlined(x, parts) for name, x in schema.items()}
    return [_inlined(x, parts) for x in schema] if isinstance(schema, list) else schema


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", openapi_extra=_described(CompletionBody))
    async def completions(
        request: Request, body: Annotated[CompletionBody, Depends(_body(CompletionBody))]
    ) -> Response:
        service.check_model(body.model)
        sampling, prompts = body.sampling(service.limits), body.prompts(service.limits)
        asked = [(prompt, params, body.cache) for prompt in prompts for params in sampling]
        context = service.context(body.context)
        echoes = body.echo
        body.release()

        async def begin() -> tuple[list[Echo], Choices]:
            echoed = [await service.echo(prompt) for prompt in prompts] if echoes else []
            return echoed, await service.open(asked, context)

        echoed, choices = await unless_gone(request, begin())
        return await _answer(request, CompletionReply(service, body, choices, echoed))

    @app.post("/v1/chat/completions", openapi_extra=_described(ChatBody))
    async def chat(
        request: Request, body: Annotated[ChatBody, Depends(_body(ChatBody))]
    ) -> Response:
        service.check_model(body.model)
        sampling = body.sampling(service.limits)
        turns, variables = body.turns, body.variables
        body.release()

        async def begin() -> Choices:
            prompt = await service.encode_chat(turns, variables)
            return await service.open([(prompt, params, body.cache) for params in sampling])

        choices = await unless_gone(request, begin())
        return await _answer(request, ChatReply(service, body, choices))


async def _answer(request: Request, reply: Reply) -> Response:
    note_reply(request.scope, reply)
    if reply.body.stream:
        return StreamingResponse(reply.events(), media_type="text/event-stream", headers=NO_CACHE)
    content = await unless_gone(request, reply.whole())
    return Response(content, media_type="application/json")


def _add_rest(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return service.card

    @app.post("/tokenize", openapi_extra=_described(TokenizeBody))
    async def tokenize(
        request: Request, body: Annotated[TokenizeBody, Depends(_body(TokenizeBody))]
    ) -> Response:
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise APIError(400, "give one of prompt and messages", param="prompt")
        if body.messages is not None and body.add_special_tokens:
            raise APIError(
                400,
                "add_special_tokens is of a prompt: a chat template writes its special tokens",
                param="add_special_tokens",
            )
        content = await unless_gone(request, service.tokenize(body))
        return Response(content, media_type="application/json")

    @app.post("/detokenize", openapi_extra=_described(DetokenizeBody))
    async def detokenize(
        request: Request, body: Annotated[DetokenizeBody, Depends(_body(DetokenizeBody))]
    ) -> dict[str, Any]:
        service.check_model(body.model)
        return {"prompt": await unless_gone(request, service.text_of(body.tokens))}

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
