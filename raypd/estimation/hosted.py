"""Compare the cost with hosted batch services.

Such a service writes the whole answer: for an extraction, the JSON with its keys. The comparison
assumes the tokens of this model's tokenizer, one request per document, and no caching.
"""

import json
import math
from collections.abc import Callable

from raypd.billing import hosted
from raypd.config import CostConfig, ExtractionConfig, GenerationConfig, RunConfig
from raypd.decoding import REGISTRY
from raypd.estimation.bootstrap import Array, figure
from raypd.estimation.profile import DocumentCost
from raypd.estimation.records import HostedEstimate


def counter(config: RunConfig) -> Callable[[str], int]:
    """Return a function that counts the tokens of a text."""
    if config.model.is_fake:
        characters = config.model.fake_costs.characters_per_token
        return lambda text: math.ceil(len(text) / characters)
    if config.model.endpoint is not None:
        # The counts of the server are used instead, so this function is not called for a result.
        return len
    from raypd.models import load_tokenizer
    from raypd.tasks import encode

    tokenizer = load_tokenizer(config.model)
    return lambda text: len(encode(tokenizer, text, special=False))


def count(
    config: RunConfig, cost: DocumentCost, count_tokens: Callable[[str], int]
) -> tuple[float, float]:
    """Count the tokens that a service would receive and write for a document.

    Args:
        config: The configuration.
        cost: What the document took; a document that failed has no tokens.
        count_tokens: Counts the tokens of a text.

    Returns:
        (tokens sent, tokens written).
    """
    if cost.error is not None:
        return 0.0, 0.0
    if isinstance(config.task, GenerationConfig):
        # Drafted tokens do not count, and a prompt that several answers share counts once.
        sent: float = 0
        for row in cost.rows:
            if row["sample"] == 0:
                sent += json.loads(row["counters"])["prompt_tokens"]
        return sent, sum(row["tokens"] for row in cost.rows)
    sent = cost.prefill_tokens + cost.shared_tokens
    written = cost.decode_tokens
    if isinstance(config.task, ExtractionConfig) and cost.rows and config.model.endpoint is None:
        record = cost.rows[0]["record"]
        written = count_tokens(json.dumps(record, indent=0, ensure_ascii=False))
        if not REGISTRY[config.decoding.method].whole_record:
            # The prompt of such a method ends with the keys, which a service writes itself.
            for name in record:
                key = json.dumps(name, ensure_ascii=False)
                sent -= count_tokens(f",\n{key}:")
    return sent, written


def estimates(
    cost: CostConfig, documents: Array, sent: Array, written: Array
) -> list[HostedEstimate]:
    """Return the price of a corpus at every service, the cheapest first.

    Args:
        cost: The section with the services and their prices.
        documents: Documents of the corpus.
        sent: Input tokens per document.
        written: Output tokens per document.
    """
    services = []
    for price in hosted(cost):
        usd = (sent * price.input + written * price.output) / 1e6
        service = HostedEstimate(
            **vars(price), usd_per_1000=figure(1000 * usd), usd=figure(documents * usd)
        )
        services.append(service)
    return sorted(services, key=lambda service: service.usd_per_1000.value)
