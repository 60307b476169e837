"""Models with recurrent or convolution layers beside attention: transformers' own, with the
attention function and the recurrent layers replaced.
"""

import torch
from transformers import PretrainedConfig, PreTrainedModel

from raypd.decoding.attention.step import Step
from raypd.decoding.memory import free_memory, is_out_of_memory
from raypd.decoding.models.stock import Stock
from raypd.decoding.recurrence.mixers import MIXERS, CurrentPass, Mixer
from raypd.decoding.recurrence.states import MIN_STATES, StatePool

# The families by their classes in transformers, with the types of layers that each has beside
# attention, as `layer_types` of a configuration names them.
HYBRIDS: dict[str, frozenset[str]] = {
    "BambaForCausalLM": frozenset({"linear_attention"}),
    "FalconH1ForCausalLM": frozenset({"hybrid"}),
    "GraniteMoeHybridForCausalLM": frozenset({"linear_attention"}),
    "Lfm2ForCausalLM": frozenset({"conv"}),
    "Lfm2MoeForCausalLM": frozenset({"conv"}),
    "NemotronHForCausalLM": frozenset({"linear_attention", "mlp", "moe"}),
    "Qwen3NextForCausalLM": frozenset({"linear_attention"}),
    "Qwen3_5ForCausalLM": frozenset({"linear_attention"}),
    "Qwen3_5MoeForCausalLM": frozenset({"linear_attention"}),
}
# A layer of type "hybrid" has both attention and a recurrence.
_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "hybrid"})
_RECURRENT_LAYERS = frozenset({"linear_attention", "conv", "hybrid"})
# The share of the free memory that states may take; the cache and the passes need the rest.
_STATE_SHARE = 0.5
# States for each program of a full batch are at most this many.
_MAX_STATES_PER_PROGRAM = 64


def is_hybrid(model: torch.nn.Module) -> bool:
    """Tell whether a model has recurrent layers that `Hybrid` computes."""
    return any(_mixer_of(module) is not None for module in model.modules())


def has_recurrent_layers(config: PretrainedConfig) -> bool:
    """Tell from a configuration whether its model has recurrent or convolution layers."""
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ())
    return bool(kinds & _RECURRENT_LAYERS)


def unknown_layers(config: PretrainedConfig, class_name: str) -> list[str]:
    """Return the types of layers of a model that no engine of raypd computes.

    Args:
        config: The model's configuration.
        class_name: Its class in transformers.
    """
    known = (_ATTENTION_LAYERS - {"hybrid"}) | HYBRIDS.get(class_name, frozenset())
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ())
    return sorted(kinds - known)


def attention_layers(config: PretrainedConfig) -> list[int]:
    """Return the numbers of the layers that attend."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    return [number for number, kind in enumerate(kinds) if kind in _ATTENTION_LAYERS]


def _mixer_of(module: torch.nn.Module) -> type[Mixer] | None:
    """Return what computes a module of transformers; None if it is no recurrent layer."""
    kind = type(module)
    if not kind.__module__.startswith("transformers.models."):
        return None
    return MIXERS.get(kind.__name__)


def replace_recurrent_layers(model: torch.nn.Module, current: CurrentPass) -> list[Mixer]:
    """Let the recurrent layers of a model follow the runs of a pass.

    Args:
        model: A model of transformers, which is changed in place.
        current: Gets the pass before the model is called.

    Returns:
        What computes each of the layers.
    """
    mixers: list[Mixer] = []
    for module in model.modules():
        kind = _mixer_of(module)
        if kind is None:
            continue
        mixer = kind(module, len(mixers), current)
        if isinstance(module.forward, Mixer):
            # An engine or a training had the model before.
            mixer.alone = module.forward.alone
        module.forward = mixer
        mixers.append(mixer)
    return mixers


class Hybrid(Stock):
    """A model of transformers with recurrent layers. It must not be called otherwise afterwards."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.current = CurrentPass()
        self.mixers = replace_recurrent_layers(model, self.current)

    def _logits(self, ids: torch.Tensor, positions: torch.Tensor, step: Step) -> torch.Tensor:
        self.current.work = step.recurrence
        try:
            return super()._logits(ids, positions, step)
        finally:
            self.current.work = None

    def make_states(
        self, device: torch.device, max_num_seqs: int, limit: int | None, memory_share: float
    ) -> StatePool:
        """Set memory aside for the states of the recurrent layers.

        Args:
            device: Where the model is.
            max_num_seqs: Programs that decode at the same time.
            limit: The largest number of states; None for as many as memory allows.
            memory_share: The share of a GPU's free memory that the engine may take.

        Raises:
            ValueError: If the memory does not hold the states of one program.
        """
        shapes = [mixer.state for mixer in self.mixers]
        state_bytes = sum(shape.nbytes for shape in shapes)
        if limit is None:
            free = free_memory(device)
            if device.type == "cuda":
                free = int(free * memory_share)
            limit = int(free * _STATE_SHARE) // state_bytes
            limit = min(limit, max(MIN_STATES, max_num_seqs * _MAX_STATES_PER_PROGRAM))
        if limit < MIN_STATES:
            raise ValueError(
                f"the memory of {device} holds {limit} states of the model's recurrent layers, of "
                f"{state_bytes / 1e6:.3g} MB each, and {MIN_STATES} are needed at least: free "
                "memory, or use a smaller model"
            )
        try:
            # A GPU's cache takes what is left, so all states are allocated before it.
            return StatePool(shapes, limit, device, allocate=device.type == "cuda")
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            message = f"the memory of {device} does not hold {limit} recurrent states"
            raise ValueError(message) from error
