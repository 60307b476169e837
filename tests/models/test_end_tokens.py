"""Every token that a model's files list as an end ends its answers, as in transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import raypd
from raypd.config import ModelConfig
from raypd.errors import ModelError
from raypd.models.load import load_tokenizer
from raypd.models.vocabulary import token_bytes, token_texts
from raypd.tasks.prompting import end_of_turn, end_tokens
from tests.tiny import EOS, VOCABULARY, save_tiny, tiny_model, tiny_tokenizer

ROWS = 280  # embeddings of the model, more than the tokenizer has tokens
LENGTH = 12

# Of each family: its special tokens, the tokenizer's own end, its chat template in short, and the
# ends that generation_config.json lists. A template shows one of these at most.
FAMILIES: dict[str, tuple[list[str], str, str, list[str]]] = {
    "glm": (
        ["<|endoftext|>", "[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>"],
        "<|endoftext|>",
        "[gMASK]<sop>{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        ["<|endoftext|>", "<|user|>", "<|observation|>"],
    ),
    "gpt_oss": (
        [
            "<|startoftext|>",
            "<|endoftext|>",
            "<|return|>",
            "<|start|>",
            "<|message|>",
            "<|end|>",
            "<|call|>",
        ],
        "<|return|>",
        "{% for m in messages %}<|start|>{{ m['role'] }}<|message|>{{ m['content'] }}"
        "{% if loop.last and m['role'] == 'assistant' %}<|return|>{% else %}<|end|>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        ["<|return|>", "<|endoftext|>", "<|call|>"],
    ),
    "llama3": (
        [
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eom_id|>",
            "<|eot_id|>",
        ],
        "<|eot_id|>",
        "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m['role'] }}"
        "<|end_header_id|>\n\n{{ m['content'] }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n"
        "{% endif %}",
        ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
    ),
    "qwen3": (
        ["<|endoftext|>", "<|im_start|>"],
        "<|im_end|>",
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        ["<|im_end|>", "<|endoftext|>"],
    ),
}


def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    special, end, template, _ = FAMILIES[family]
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.eos_token = end
    tokenizer.chat_template = template
    return tokenizer


def write(folder: Path, name: str, **settings: Any) -> None:
    """Changes a JSON file of a model, or makes it."""
    file = folder / name
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(before | settings))


def ids_of(tokenizer: PreTrainedTokenizerFast, tokens: list[str]) -> list[int]:
    return [tokenizer.convert_tokens_to_ids(token) for token in tokens]


def save_that_says(folder: Path, tokenizer: PreTrainedTokenizerFast, end: int) -> Path:
    """Saves a model that says `end` as the fifth token of its answer to "Hi"."""
    model = tiny_model("llama", vocab_size=ROWS)
    prompt = prompt_of(tokenizer)
    free = model.generate(
        prompt,
        do_sample=False,
        max_new_tokens=LENGTH,
        eos_token_id=None,
    )
    answer = free[0, prompt.shape[1] :].tolist()
    place = next(n for n in range(4, LENGTH) if answer[n] not in answer[:n] and end not in answer)
    rows = model.lm_head.weight.data
    rows[[answer[place], end]] = rows[[end, answer[place]]]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def prompt_of(tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_ends_at_every_token_that_the_family_lists(tmp_path: Path, family: str) -> None:
    listed = FAMILIES[family][3]
    tokenizer = tokenizer_of(family)
    ends = ids_of(tokenizer, listed)
    for number, end in enumerate(ends):
        folder = save_that_says(tmp_path / str(number), tokenizer, end)
        write(folder, "generation_config.json", eos_token_id=ends)
        write(folder, "config.json", eos_token_id=ends)
        loaded = load_tokenizer(ModelConfig(name=str(folder)))
        assert end_tokens(loaded) == {*ends, loaded.eos_token_id}
        expected = AutoModelForCausalLM.from_pretrained(folder).generate(
            prompt_of(tokenizer), do_sample=False, max_new_tokens=LENGTH, pad_token_id=0
        )
        before_end = expected[0, prompt_of(tokenizer).shape[1] : -1].tolist()
        assert expected[0, -1] == end
        llm = raypd.LLM(
            str(folder),
            settings={
                "model.dtype": "float32",
                "model.device": "cpu",
                "decoding.max_new_tokens": LENGTH,
            },
        )
        (answer,) = llm.generate(["Hi"])
        assert answer.status == "stop"
        assert answer.value == tokenizer.decode(before_end, skip_special_tokens=True)


def test_config_json_is_read_where_there_is_no_generation_config(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", vocab_size=ROWS)
    (folder / "generation_config.json").unlink()
    write(folder, "config.json", eos_token_id=[EOS, 77])
    tokenizer = load_tokenizer(ModelConfig(name=str(folder)))
    assert end_tokens(tokenizer) == {EOS, 77}
    # An end is no text, also where it is no special token.
    assert token_texts(tokenizer)[77] == ""
    assert token_bytes(tokenizer)[77] == b""


def test_an_id_of_config_json_that_spells_text_is_not_believed_beside_a_generation_config(
    tmp_path: Path,
) -> None:
    folder = save_tiny(tmp_path / "model", vocab_size=ROWS)
    write(folder, "generation_config.json", eos_token_id=[EOS, 78])
    write(folder, "config.json", eos_token_id=77, text_config={"eos_token_id": 1})
    assert end_tokens(load_tokenizer(ModelConfig(name=str(folder)))) == {EOS, 78, 1}


def test_a_default_of_transformers_is_no_end(tmp_path: Path) -> None:
    """The class of Llama's configuration has an end of its own, which no file names here."""
    folder = save_tiny(tmp_path / "model")
    (folder / "generation_config.json").unlink()
    settings = json.loads((folder / "config.json").read_text())
    del settings["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(ModelConfig(name=str(folder)))
    tokenizer.eos_token = None
    tokenizer.chat_template = None
    assert end_tokens(tokenizer) == frozenset()
    with pytest.raises(ModelError, match="names a token that ends an answer"):
        end_of_turn(tokenizer)


def test_the_first_end_of_the_files_is_trained_where_the_tokenizer_has_none(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    write(folder, "generation_config.json", eos_token_id=[9, EOS])
    tokenizer = load_tokenizer(ModelConfig(name=str(folder)))
    tokenizer.eos_token = None
    tokenizer.chat_template = None
    assert end_of_turn(tokenizer) == 9


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json cannot be read"):
        load_tokenizer(ModelConfig(name=str(folder)))


def test_a_tokenizer_without_end_and_template_is_answered_with(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.eos_token = None
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink()
    (folder / "generation_config.json").unlink()
    llm = raypd.LLM(str(folder), settings={"model.dtype": "float32", "decoding.max_new_tokens": 4})
    (answer,) = llm.generate(["Hi"])
    assert answer.error is None


@pytest.mark.parametrize("method", ["autoregressive", "guided", "hyper_parallel"])
def test_ids_beyond_the_vocabulary_are_answers_without_text(tmp_path: Path, method: str) -> None:
    """Many models have more embeddings than tokens, and a weak one predicts such an id."""
    model = tiny_model("llama", vocab_size=ROWS)
    model.lm_head.weight.data[VOCABULARY:] *= 20
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    predicted = model.generate(
        torch.tensor([[65, 66]]),
        do_sample=False,
        max_new_tokens=LENGTH,
    )
    assert (predicted[0, 2:] >= VOCABULARY).sum() > LENGTH / 2
    lengths = {"decoding.max_new_tokens": LENGTH, "decoding.max_value_tokens": 4}
    settings = {"model.dtype": "float32", "decoding.method": method, **lengths}
    llm = raypd.LLM(str(tmp_path / "model"), settings=settings)
    answers = llm.extract(["Bose QC45"], ["Brand", "Model"])
    if method == "autoregressive":
        questions = ["Who?", {"question": "Which?", "choices": ["a", "b"]}]
        answers += llm.answer("Bose was founded in 1964.", questions)
        answers += llm.generate(["Hi"])
    assert [answer.error for answer in answers] == [None] * len(answers)
