"""Errors in OpenAI's format: {"error": {"message", "type", "param", "code"}}."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from kvfold.utils.errors import SettingError

INVALID, SERVER = "invalid_request_error", "server_error"


class APIError(Exception):
    """An error that is sent to the client.

    status: of HTTP. param: the field that is wrong. code: for programs that read it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    @property
    def body(self) -> dict[str, Any]:
        kind = INVALID if self.status < 500 else SERVER
        kind = "rate_limit_error" if self.status == 429 else kind
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, headers=self.headers)


def at_most(name: str, value: float, most: int, unit: str = "") -> None:
    """Raises APIError for a field with too much in it."""
    if value > most:
        raise APIError(
            400, f"{name} must be at most {most}{unit and ' '}{unit}; got {value}", param=name
        )


def from_value_error(error: ValueError) -> APIError:
    """The 400 response for a setting or prompt that the engine refused. `param` is the setting, if
    the error names one."""
    named = re.search(r"`([a-z_]+)", error.text) if isinstance(error, SettingError) else None
    return APIError(400, str(error), param=named[1] if named else None)


def install(app: FastAPI) -> None:
    """Register handlers so that every error is sent in OpenAI's format."""
    from kvfold.engine.api.async_llm import EngineFault  # imports torch; a router runs without it

    for error_type, to_api_error in {
        APIError: lambda error: error,
        RequestValidationError: _invalid,
        HTTPException: _http,
        EngineFault: lambda error: APIError(503, str(error), code="engine_fault"),
        Exception: lambda _: APIError(500, "the server failed at this request; its log says why"),
    }.items():

        async def answer(
            _: Request, error: Exception, to_api_error: Any = to_api_error
        ) -> JSONResponse:
            return to_api_error(error).response

        app.add_exception_handler(error_type, answer)


# An unknown field of the body itself, not of an object inside it.
UNKNOWN = re.compile(r"Object contains unknown field `((?:(?!` - at `\$).)*)`", re.DOTALL)
_FIELDS = (re.compile(r"`\$\.(\w+)"), re.compile(r"required field `(\w+)`"))
_MESSAGE_FIELD = re.compile(r"`\$\.messages\[[^]]*\]\.(\w+)`$")


def invalid(error: Exception, param: str | None = None) -> APIError:
    """The 400 response for a body that msgspec cannot decode.

    param: the field, if only one was decoded; otherwise it is read from msgspec's message.
    """
    text, *_ = str(error).partition(" - at `")
    if isinstance(error, RecursionError):
        return APIError(400, "the body is nested too deeply", param=param, code=INVALID_JSON)
    if not isinstance(error, msgspec.ValidationError):
        return APIError(
            400, f"the body is not JSON in UTF-8: {text}", param=param, code=INVALID_JSON
        )
    message_field = _MESSAGE_FIELD.search(str(error))
    if message_field and message_field[1] not in MESSAGE_FIELDS:
        text = f"messages: {message_field[1]} is not supported by this server; leave it out"
        return APIError(400, text, param="messages")
    matches = (pattern.search(str(error)) for pattern in _FIELDS)
    field = param or next((match[1] for match in matches if match), None)
    if field is None:
        return APIError(400, "the body must be a JSON object, sent as application/json")
    hint = f"; {LEGAL[field]}" if field in LEGAL else ""
    return APIError(400, f"{field}: {text[:1].lower()}{text[1:]}{hint}", param=field)


LEGAL = {  # hints for fields whose type alone does not say what to send
    "prompt": "send a text, token ids, or a list of either",
    "messages": 'send [{"role": "user", "content": text}]',
    "response_format": 'its type is "text", "json_object" or "json_schema"',
    "stream_options": 'send {"include_usage": true}',
    "tools": 'send [{"type": "function", "function": {"name": ..., "parameters": a schema}}]',
    "tool_choice": 'send "none", "auto", "required" or '
    '{"type": "function", "function": {"name": ...}}',
    "structured_outputs": 'send {"regex": "[0-9]{3}"}, or response_format for JSON',
}
MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id")
INVALID_JSON = "invalid_json"


def _invalid(error: RequestValidationError) -> APIError:
    """The 400 response for an invalid path parameter."""
    first = error.errors()[0]
    where = str(first["loc"][-1])
    return APIError(400, f"{where}: {first['msg']}", param=where)


def _http(error: HTTPException) -> APIError:
    return APIError(error.status_code, str(error.detail), headers=error.headers)
