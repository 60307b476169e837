"""Keys of earlier releases."""

# What to write instead of a key that has moved.
MOVED = {
    **{
        f"storage.{name}": f"storage.options.{name}"
        for name in (
            "endpoint_url",
            "region",
            "profile",
            "anonymous",
            "requester_pays",
            "sse",
            "kms_key_id",
            "connect_timeout",
            "read_timeout",
            "max_attempts",
        )
    },
    **{
        f"decoding.{name}": f"decoding.options.{name}"
        for name in (
            "contexts_per_prompt",
            "promised_length",
            "fixed_length",
            "max_async_tokens",
            "max_threads",
            "mask_tokens",
            "heads",
        )
    },
    "decoding.speculative": "decoding.options",
    "decoding.skeleton_of_thought": "decoding.options",
    "fit.validation_share": "training.validation_share",
    "training.lora_rank": "training.lora.rank",
    "training.lora_alpha": "training.lora.alpha",
    "training.lora_dropout": "training.lora.dropout",
    "training.schedule": "training.trainer.lr_scheduler_type",
    "training.warmup": "training.trainer.warmup_steps",
    "training.weight_decay": "training.trainer.weight_decay",
    "training.max_grad_norm": "training.trainer.max_grad_norm",
    "training.accumulate": "training.trainer.gradient_accumulation_steps",
    "training.gradient_checkpointing": "training.trainer.gradient_checkpointing",
}

# Removed keys, and what to use instead.
REMOVED = {
    "cluster.executor": (
        "this key was removed, because a pool of workers is the only executor: use "
        "cluster.readers, the number of tasks in which Ray Data reads the input ahead of the pool"
    ),
    "training.batch_tokens": (
        "this key was removed: a pass has at most 4,096 tokens, or one longer example; set "
        "training.batch_size to make passes smaller"
    ),
    "cost.watts_per_gpu": "this key was removed, because the energy of a bill is what NVML counts",
    "cost.co2e_grams_per_kwh": (
        "this key was removed, because the energy of a bill is what NVML counts; multiply it "
        "yourself"
    ),
    "cost.bill_head": (
        "this key was removed, because the head node costs money like any other: to leave it out, "
        "give its instance type the price 0 in cost.prices"
    ),
    "cost.reserve_seconds": (
        "this key was removed: the price of 10 seconds of all nodes is always reserved; change "
        "cost.budget_usd instead"
    ),
}


# In extraction and question answering, `task.too_long` is now `task.long_documents`. These are the
# new names of its values.
LONG_DOCUMENTS = {"truncate": "head", "windows": "split", "refuse": "reject"}


def moved_to(key: str) -> str:
    """Say what to write instead of a dotted key of an earlier release; "" for any other key."""
    if key == "task.too_long":
        values = ", ".join(f"{old} is {new}" for old, new in LONG_DOCUMENTS.items())
        return f"this key is now task.long_documents ({values})"
    key = key.removeprefix("cascade.")
    if key in REMOVED:
        return REMOVED[key]
    if key in MOVED:
        return f"this key is now {MOVED[key]}"
    return ""
