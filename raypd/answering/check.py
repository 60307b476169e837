"""What a worker would fail at, said before one starts."""

from __future__ import annotations

import sys

from raypd.config import RunConfig


def check_model(config: RunConfig, machine: bool = False) -> None:
    """Raises ModelError or ConfigError before weights are loaded. machine: workers run on machines like this one."""
    if config.model.endpoint is not None:
        from raypd.models.endpoint import check_endpoint

        check_endpoint(config)
    if config.model.has_weights:
        print("checking the model", file=sys.stderr, flush=True)  # it imports torch and transformers, for seconds
        from raypd.models.check_method import check_method
        from raypd.models.load import check_model_config
        from raypd.models.vllm_engine import check_vllm
        from raypd.tasks import check_task
        from raypd.tasks.card import check_card, untrained

        check_model_config(config.model, machine)
        if machine:
            check_vllm(config)
        check_method(config)
        check_card(config)
        if warning := untrained(config):
            print(warning, file=sys.stderr, flush=True)
        check_task(config)
