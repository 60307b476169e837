"""Queries that grow with their position, as in Ministral 3 and Mistral 4."""

from typing import Any

import torch


def query_scale(config: Any, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the factor of queries after their rotation.

    Args:
        config: The text configuration.
        positions: [tokens]
        dtype: The dtype of the queries.

    Returns:
        [tokens, 1, 1]
    """
    rope = config.rope_parameters
    beta = rope.get("llama_4_scaling_beta")
    length = rope.get("original_max_position_embeddings")
    scale = 1 + beta * torch.log(1 + torch.floor(positions / length))
    return scale.to(dtype)[:, None, None]
