"""Errors in OpenAI's form: {"error": {"message", "type", "param", "code"}}."""

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
    """What a client is told. param: the field that is wrong; code: for programs."""

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


def from_value_error(error: ValueError) -> APIError:
    """A setting or prompt that the engine refused, and which it was."""
    named = re.search(r"`([a-z_]+)", error.text) if isinstance(error, SettingError) else None
    return APIError(400, str(error), param=named[1] if named else None)


def install(app: FastAPI) -> None:
    """Answer every error in this form."""
    from kvfold.engine.api.async_llm import EngineFault  # with torch, which a router does without

    for kind, spell in {
        APIError: lambda error: error,
        RequestValidationError: _invalid,
        HTTPException: _http,
        EngineFault: lambda error: APIError(503, str(error), code="engine_fault"),
        Exception: lambda _: APIError(500, "the server failed at this request; its log says why"),
    }.items():

        async def answer(_: Request, error: Exception, spell: Any = spell) -> JSONResponse:
            return spell(error).response

        app.add_exception_handler(kind, answer)


# Of a body itself, and not of an object in it.
UNKNOWN = re.compile(r"Object contains unknown field `((?:(?!` - at `\$).)*)`", re.DOTALL)
_FIELD = re.compile(r"`\$\.(\w+)|required field `(\w+)`")
_OF_MESSAGE = re.compile(r"`\$\.messages\[[^]]*\]\.(\w+)`$")


def invalid(error: Exception, param: str | None = None) -> APIError:
    """What msgspec says of a body, and of which field (param, where it was told one alone)."""
    text, *_ = str(error).partition(" - at `")
    if isinstance(error, RecursionError):
        return APIError(400, "the body is nested too deeply", param=param, code=NO_JSON)
    if not isinstance(error, msgspec.ValidationError):
        return APIError(400, f"the body is not JSON in UTF-8: {text}", param=param, code=NO_JSON)
    inside = _OF_MESSAGE.search(str(error))
    if inside and inside[1] not in READ_OF_MESSAGES:
        text = f"messages: {inside[1]} is not supported by this server; leave it out"
        return APIError(400, text, param="messages")
    named = _FIELD.search(str(error))
    where = param or (named and (named[1] or named[2]))
    if where is None:
        return APIError(400, "the body must be a JSON object, sent as application/json")
    hint = f"; {LEGAL[where]}" if where in LEGAL else ""
    return APIError(400, f"{where}: {text[:1].lower()}{text[1:]}{hint}", param=where)


LEGAL = {  # where a type says too little
    "prompt": "send a text, token ids, or a list of either",
    "messages": 'send [{"role": "user", "content": text}]',
    "response_format": 'its type is "text", "json_object" or "json_schema"',
    "stream_options": 'send {"include_usage": true}',
    "structured_outputs": 'send {"regex": "[0-9]{3}"}, or response_format for JSON',
}
READ_OF_MESSAGES = ("role", "content", "name")
NO_JSON = "invalid_json"


def _invalid(error: RequestValidationError) -> APIError:
    """A wrong part of a path."""
    first = error.errors()[0]
    where = str(first["loc"][-1])
    return APIError(400, f"{where}: {first['msg']}", param=where)


def _http(error: HTTPException) -> APIError:
    return APIError(error.status_code, str(error.detail), headers=error.headers)
