"""Names what can run models, or read weights, that raypd's own engine does not support.

The lists are from vLLM's registries of models and quantization methods. They contain only what
raypd refuses, so a refusal of anything else needs a new line here.
"""

from transformers import PretrainedConfig

_SERVER = "a server that supports it may answer in its place (model.endpoint)"

# Model classes that vLLM decodes, as `architectures` in config.json names them.
VLLM_ARCHITECTURES = {
    "BambaForCausalLM",
    "BloomForCausalLM",
    "DeepseekV32ForCausalLM",
    "FalconForCausalLM",
    "FalconH1ForCausalLM",
    "FalconMambaForCausalLM",
    "GPTJForCausalLM",
    "Gemma3nForConditionalGeneration",
    "Glm4vForConditionalGeneration",
    "GptOssForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "InternVLChatModel",
    "InternVLForConditionalGeneration",
    "JambaForCausalLM",
    "KimiLinearForCausalLM",
    "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "Llama4ForCausalLM",
    "Llama4ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "Mamba2ForCausalLM",
    "MambaForCausalLM",
    "MiMoV2FlashForCausalLM",
    "MiniMaxForCausalLM",
    "MiniMaxM1ForCausalLM",
    "MiniMaxText01ForCausalLM",
    "Mistral3ForConditionalGeneration",
    "MptForCausalLM",
    "NemotronForCausalLM",
    "NemotronHForCausalLM",
    "PaliGemmaForConditionalGeneration",
    "Phi3ForCausalLM",
    "PhiMoEForCausalLM",
    "PixtralForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3NextForCausalLM",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "StableLmForCausalLM",
    "Zamba2ForCausalLM",
}

# Values of `quant_method` that vLLM reads.
VLLM_QUANTIZATIONS = {
    "aqlm",
    "auto-round",
    "awq",
    "bitsandbytes",
    "compressed-tensors",
    "experts_int8",
    "fbgemm_fp8",
    "fp8",
    "gguf",
    "gptq",
    "hqq",
    "modelopt",
    "modelopt_fp4",
    "moe_wna16",
    "mxfp4",
    "quark",
    "torchao",
}


def who_runs(config: PretrainedConfig, class_name: str | None = None) -> str:
    """Return a clause that says what can run a model that raypd's engine does not support.

    Args:
        config: The model's configuration, as transformers reads config.json.
        class_name: The model's class in transformers, for a configuration without `architectures`.
    """
    names = getattr(config, "architectures", None) or [class_name]
    if VLLM_ARCHITECTURES.intersection(names):
        return "engine.kind=vllm can run this model"
    return _SERVER


def who_reads(method: str) -> str:
    """Return a clause that says what reads weights of a `quant_method` that raypd does not."""
    if method in VLLM_QUANTIZATIONS:
        return "engine.kind=vllm reads it, on a GPU, and so may a server (model.endpoint)"
    return _SERVER
