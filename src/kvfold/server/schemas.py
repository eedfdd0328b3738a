"""Limits of the JSON schemas that clients send."""

from typing import Any

from kvfold.server.errors import at_most

# xgrammar takes long to compile longer or deeper ones.
MAX_SCHEMA, MAX_PATTERN, MAX_DEPTH = 2**16, 1024, 64  # bytes, characters, levels


def check_schema(name: str, item: Any, depth: int = 0) -> None:
    """Raises APIError for a schema that is nested too deeply, or has a too long string (it may be a
    pattern). Descriptions may be long. name: the field that has the schema."""
    at_most(name, depth, MAX_DEPTH, "levels of a schema")
    if isinstance(item, str):
        at_most(name, len(item), MAX_PATTERN, "characters of a schema's string")
    if isinstance(item, dict):
        values = [x for key, x in item.items() if key != "description" or not isinstance(x, str)]
        item = [*item, *values]
    for child in item if isinstance(item, list) else ():
        check_schema(name, child, depth + 1)
