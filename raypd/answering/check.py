"""Preflight checks, so that what would fail in a worker fails in the driver instead."""

import sys

from raypd.config import RunConfig


def check_model(config: RunConfig, machine: bool = False) -> None:
    """Check the models of a run without loading weights.

    Args:
        config: The run's configuration.
        machine: Whether workers run on machines like this one, so that its GPU and installed
            packages can be checked, too.

    Raises:
        ModelError, ConfigError: If a model cannot be decoded as the configuration says.
    """
    second = config.second_model()
    if second is not None:
        check_model(second, machine)
    if config.model.endpoint is not None:
        from raypd.models import check_endpoint

        check_endpoint(config.model.endpoint, config.decoding.method)
    if config.model.has_weights:
        _check_weights(config, machine)


def _check_weights(config: RunConfig, machine: bool) -> None:
    # The imports of torch and transformers take seconds.
    _say("checking the model")
    from raypd.models import check_model_config, check_vllm, quantization_notice
    from raypd.tasks import check_card, check_task, untrained

    is_own_engine = config.engine.kind == "raypd"
    check_model_config(config.model, machine, "decode" if is_own_engine else "vllm")
    if machine:
        check_vllm(config.engine)
    if machine and is_own_engine:
        notice = quantization_notice(config.model)
        if notice:
            _say(notice)
    check_method(config)
    check_card(config)
    warning = untrained(config)
    if warning:
        _say(warning)
    check_task(config)
    if machine and is_own_engine:
        _say(path_of(config))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def check_method(config: RunConfig) -> None:
    """Check what the decoding method needs besides the model.

    Raises:
        ModelError: If the model lacks control tokens or has recurrent layers that the method cannot
            follow, or if heads or a draft model are missing or do not fit.
    """
    from raypd.decoding import REGISTRY
    from raypd.models import check_recurrence, control_tokens, draft, load, medusa_heads, source

    decoding = config.decoding
    model = config.model
    spec = REGISTRY[decoding.method]
    required = spec.required_tokens(decoding.method_options)
    if required:
        tokenizer = load.load_tokenizer(model)
        for name in required:
            control_tokens.control_token(tokenizer, name, model.name)
    if spec.heads:
        heads = str(decoding.heads)
        sizes = medusa_heads.read_sizes(heads)
        text = source.read_config(source.find_source(model)).get_text_config()
        medusa_heads.check_fit(heads, sizes, model.name, text.hidden_size, text.vocab_size)
    if decoding.draft_model is not None:
        draft.check_draft_model(model, decoding.draft_model)
    if config.engine.kind == "raypd":
        check_recurrence(config.model, config.decoding, config.task.kind)


def path_of(config: RunConfig) -> str:
    """Return a line that says what decodes on a machine like this one.

    For a CPU it says why it is not the fastest path.
    """
    import torch

    from raypd.decoding import is_best, native
    from raypd.models import resolve_device, resolve_dtype

    device = resolve_device(config.model.device)
    dtype = resolve_dtype(config.model.dtype, device)
    kind = str(dtype).removeprefix("torch.")
    if device.type != "cpu":
        return f"decoding on {device} in {kind}"
    if is_best(device, dtype):
        line = f"decoding on the CPU in {kind}, with AVX-512 BF16"
        if config.model.kv_cache != "auto":
            cache = f"model.kv_cache is {config.model.kv_cache}"
            line += f", but attention by torch, which is slower: {cache}"
        return line
    if native.has("amx_bf16") and dtype == torch.bfloat16:
        return f"decoding on the CPU in {kind}, with oneDNN and AMX"
    refusal = native.refusal() or "is for bfloat16"
    return f"decoding on the CPU in {kind}, with torch alone: the fast path {refusal}"
