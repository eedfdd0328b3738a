"""The Python API: LLM, AsyncLLM, output streams, text and grammars."""
