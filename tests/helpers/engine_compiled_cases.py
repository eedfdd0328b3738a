"""What tests of engine compiled share with others."""

from kvfold.config import CacheConfig
from kvfold.engine.runner.build import build_runner
from kvfold.engine.runner.runner import ModelRunner
from models import tiny


def runner_of(name: str, **settings) -> ModelRunner:
    config = CacheConfig(page=16, kv_bytes=2**21, **settings)
    return build_runner(tiny(name), config, num_slots=5, max_tokens=64)
