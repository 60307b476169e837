"""What a hosted batch service would ask for the tokens of a sample, to compare with.

It writes the answer whole: for extraction the JSON with its keys. Assumed: this model's tokens, one
request a document, no caching.
"""

import json
import math
from collections.abc import Callable

from raypd.billing.prices import hosted
from raypd.config import CostConfig, ExtractionConfig, GenerationConfig, RunConfig
from raypd.decoding.methods.registry import REGISTRY
from raypd.estimation.bootstrap import Array, figure
from raypd.estimation.profile import DocumentCost
from raypd.estimation.records import HostedEstimate


def counter(config: RunConfig) -> Callable[[str], int]:
    """How many tokens a text has."""
    if config.model.is_fake:
        return lambda text: math.ceil(len(text) / config.model.fake.characters_per_token)
    if config.model.endpoint is not None:
        return len  # of no use: the server counts what it writes
    from raypd.models.load import load_tokenizer
    from raypd.tasks.prompting import encode

    tokenizer = load_tokenizer(config.model)
    return lambda text: len(encode(tokenizer, text, special=False))


def count(
    config: RunConfig, cost: DocumentCost, tokens: Callable[[str], int]
) -> tuple[float, float]:
    """(tokens sent, tokens written) of a document; none of one that failed. tokens: counts those of
    a text.
    """
    if cost.error is not None:
        return 0.0, 0.0
    # What was drafted, and answers that share a prompt, count once.
    if isinstance(config.task, GenerationConfig):
        prompt_tokens = [
            json.loads(row["counters"])["prompt_tokens"] for row in cost.rows if row["sample"] == 0
        ]
        return sum(prompt_tokens), sum(row["tokens"] for row in cost.rows)
    sent = cost.prefill_tokens + cost.shared_tokens
    written = cost.decode_tokens
    if isinstance(config.task, ExtractionConfig) and cost.rows and config.model.endpoint is None:
        record = json.loads(cost.rows[0]["record"])
        written = tokens(json.dumps(record, indent=0, ensure_ascii=False))
        if not REGISTRY[config.decoding.method].whole_record:  # its prompt ends in the keys
            sent -= sum(
                tokens(",\n" + json.dumps(name, ensure_ascii=False) + ":") for name in record
            )
    return sent, written


def estimates(
    cost: CostConfig, documents: Array, sent: Array, written: Array
) -> list[HostedEstimate]:
    """The price of a corpus at every service, the cheapest first. sent, written: tokens of one
    document.
    """
    services = []
    for price in hosted(cost):
        usd = (sent * price.input + written * price.output) / 1e6
        services.append(
            HostedEstimate(
                **vars(price), usd_per_1000=figure(1000 * usd), usd=figure(documents * usd)
            )
        )
    return sorted(services, key=lambda service: service.usd_per_1000.value)
