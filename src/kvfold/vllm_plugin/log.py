"""The plugin's logger, whose messages vLLM's handlers print."""

import logging

logger = logging.getLogger("vllm.kvfold")
