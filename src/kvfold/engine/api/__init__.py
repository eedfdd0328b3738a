"""What programs call: LLM, AsyncLLM, streams, text and grammars."""
