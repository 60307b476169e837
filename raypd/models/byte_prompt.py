"""The tokenizer of prompts for a server: a token per byte, and a token per role.

A server takes messages of text, while tasks write token ids. This tokenizer turns messages into
ids without loss, so that the engine can turn the ids back into messages.
"""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

_ROLES = ("system", "user", "assistant")
_END = "<|end|>"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose ids 0 to 255 are bytes.

    The next ids are a token that begins a message of each role, and the token that ends a message.
    """
    vocabulary = {letter: byte for byte, letter in bytes_to_unicode().items()}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=_END,
        extra_special_tokens={role: _role_token(role) for role in _ROLES},
    )
    tokenizer.chat_template = (
        "{% for message in messages %}"
        "{{ '<|' + message['role'] + '|>' + message['content'] + '" + _END + "' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    return tokenizer


def messages_of(
    tokenizer: PreTrainedTokenizerFast, prompt: list[int]
) -> tuple[list[dict[str, str]], str]:
    """Turn the ids of a prompt back into messages.

    Args:
        tokenizer: The tokenizer that made the ids.
        prompt: The ids.

    Returns:
        The messages (`role`, `content`), and the text after the last of them, which is the
        beginning of the answer.
    """
    end = tokenizer.eos_token_id
    role_of = {tokenizer.convert_tokens_to_ids(_role_token(role)): role for role in _ROLES}
    messages: list[dict[str, str]] = []
    role = "user"
    begin = 0
    for position, token in enumerate(prompt):
        if token == end:
            messages.append({"role": role, "content": tokenizer.decode(prompt[begin:position])})
            begin = position + 1
        elif token in role_of:
            role = role_of[token]
            begin = position + 1
    return messages, tokenizer.decode(prompt[begin:])


def _role_token(role: str) -> str:
    return f"<|{role}|>"
