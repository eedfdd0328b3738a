"""The HTTP routes of `kvfold serve`."""

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
from kvfold.server.dashboard import add_dashboard
from kvfold.server.errors import APIError, from_value_error, install
from kvfold.server.guard import Guard, HeadAsGet, cancel_on_disconnect
from kvfold.server.limits import Limits
from kvfold.server.protocol import (
    CLIENT_NAMES,
    B,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    decode,
    with_unsupported_fields,
)
from kvfold.server.reasoning import Phase, guide_content
from kvfold.server.request_log import note_response
from kvfold.server.responses import ChatResponse, CompletionResponse, GenerationResponse
from kvfold.server.service import ChoiceStream, EchoedPrompt, Service

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
    """An ASGI application that serves `llm` under the model name `name`, and closes `llm` at
    shutdown.

    api_key: clients must send it, except for /health, /docs and the dashboard, which asks for it.
    contexts: packed contexts that completions may start with, by name.
    allow_origins: origins of web pages that may call the server (CORS); "*": any.

    Raises ValueError for a context that does not fit `llm`.
    """
    limits = limits or Limits()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with llm:
            yield

    app = FastAPI(title="kvfold", version=kvfold.__version__, lifespan=lifespan, redoc_url=None)
    app.add_middleware(HeadAsGet)
    app.add_middleware(Guard, limits=limits, key=api_key)
    if allow_origins:  # outside the guard: a browser needs CORS headers to read its errors, too
        app.add_middleware(
            CORSMiddleware, allow_origins=allow_origins, allow_methods=["*"], allow_headers=["*"]
        )
    install(app)
    app.add_exception_handler(ValueError, _on_value_error)
    service = Service(llm, name, limits, contexts or {})
    _add_generation(app, service)
    _add_other_routes(app, service)
    add_dashboard(app, llm.llm)
    return app


async def _on_value_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ValueError)
    return from_value_error(error).response


def _body_reader(body_type: type[B]) -> Callable[[Request], Awaitable[B]]:
    """A dependency that reads a request's body as `body_type`.

    Only JSON content types are accepted, because a web page may send others to any server without a
    CORS check.
    """

    async def read(request: Request) -> B:
        header = Message()
        header["content-type"] = request.headers.get("content-type", "")
        subtype = header.get_content_subtype()
        if header.get_content_maintype() != "application" or (
            subtype != "json" and not subtype.endswith("+json")
        ):
            raise APIError(400, "the body must be a JSON object, sent as application/json")
        # Unlike with `request.body()`, the request does not hold the body.
        return decode(body_type, b"".join([part async for part in request.stream()]))

    return read


def _openapi_body(body_type: type[Body]) -> dict[str, Any]:
    """The OpenAPI description of a body, for /docs."""
    (schema,), definitions = msgspec.json.schema_components(
        [with_unsupported_fields(body_type)], ref_template="#/$defs/{name}"
    )
    name = schema["$ref"].rpartition("/")[2]
    content = {"schema": _inlined(definitions[name], definitions)}
    return {"requestBody": {"required": True, "content": {"application/json": content}}}


def _inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """A JSON schema with its references replaced by what they refer to."""
    if isinstance(schema, dict) and "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if isinstance(schema, dict):
        return {name: _inlined(x, definitions) for name, x in schema.items()}
    return [_inlined(x, definitions) for x in schema] if isinstance(schema, list) else schema


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", openapi_extra=_openapi_body(CompletionBody))
    async def completions(
        request: Request, body: Annotated[CompletionBody, Depends(_body_reader(CompletionBody))]
    ) -> Response:
        service.check_model(body.model)
        sampling, prompts = body.sampling(service.limits), body.prompts(service.limits)
        specs = [(prompt, params, body.cache) for prompt in prompts for params in sampling]
        context = service.context(body.context)
        wants_echo, requested = body.echo, body.requested_tokens
        body.release()

        async def begin() -> tuple[list[EchoedPrompt], ChoiceStream]:
            echoed = [await service.echo(prompt) for prompt in prompts] if wants_echo else []
            return echoed, await service.submit(specs, context, requested)

        echoed, choices = await cancel_on_disconnect(request, begin())
        return await _respond(request, CompletionResponse(service, body, choices, echoed))

    @app.post("/v1/chat/completions", openapi_extra=_openapi_body(ChatBody))
    async def chat(
        request: Request, body: Annotated[ChatBody, Depends(_body_reader(ChatBody))]
    ) -> Response:
        service.check_model(body.model)
        tools = body.tool_use(service.chat_template)
        sampling = body.sampling(service.limits, **service.chat_settings(tools))
        messages, variables = body.template_messages, body.template_variables
        names = CLIENT_NAMES | {"structural_tag": body.grammar_field}
        body.release()

        async def begin() -> tuple[ChoiceStream, Phase]:
            prompt = await service.encode_chat(messages, variables)
            continues = bool(variables.get("continue_final_message"))
            phase = service.phase_of(prompt, messages, continues)
            guided = guide_content(sampling, phase)
            specs = [(prompt, params, body.cache) for params in guided]
            requested = body.requested_tokens
            return await service.submit(specs, requested=requested, names=names), phase

        choices, phase = await cancel_on_disconnect(request, begin())
        return await _respond(request, ChatResponse(service, body, choices, tools, phase))


async def _respond(request: Request, response: GenerationResponse) -> Response:
    note_response(request.scope, response)
    if response.body.stream:
        return StreamingResponse(
            response.events(), media_type="text/event-stream", headers=NO_CACHE
        )
    content = await cancel_on_disconnect(request, response.json_body())
    return Response(content, media_type="application/json")


def _add_other_routes(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.model_card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return service.model_card

    @app.post("/tokenize", openapi_extra=_openapi_body(TokenizeBody))
    async def tokenize(
        request: Request, body: Annotated[TokenizeBody, Depends(_body_reader(TokenizeBody))]
    ) -> Response:
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise APIError(400, "give one of prompt and messages", param="prompt")
        if body.messages is not None and body.add_special_tokens:
            raise APIError(
                400,
                "add_special_tokens is for a prompt: a chat template adds its own special tokens",
                param="add_special_tokens",
            )
        content = await cancel_on_disconnect(request, service.tokenize(body))
        return Response(content, media_type="application/json")

    @app.post("/detokenize", openapi_extra=_openapi_body(DetokenizeBody))
    async def detokenize(
        request: Request, body: Annotated[DetokenizeBody, Depends(_body_reader(DetokenizeBody))]
    ) -> dict[str, Any]:
        service.check_model(body.model)
        return {"prompt": await cancel_on_disconnect(request, service.detokenize(body.tokens))}

    @app.get("/health")
    async def health() -> dict[str, str]:
        if (fault := service.async_llm.fault) is not None:
            raise APIError(503, f"the engine failed: {fault}", code="engine_fault")
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text, media_type=CONTENT_TYPE_LATEST)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": kvfold.__version__}
