"""A decoding method of one's own: a generator that says what is fed and who sees whom.

The engine does the rest.

CoT-decoding (Wang and Zhou, 2024): the k most likely first tokens each begin an answer, all are
decoded greedily, and the surest one counts. Here the k answers are segments of one row: each sees
the prompt and itself, and a pass decodes a token of every one.

    python examples/own_method.py
"""

from collections.abc import Sequence

from raypd.config import ModelConfig
from raypd.decoding.engine import Engine
from raypd.decoding.program import Feed, Program
from raypd.decoding.visibility import Reach
from raypd.models.load import load_model


def cot_decoding(
    prompt: Sequence[int], k: int, tokens: int, end: int
) -> Program[tuple[float, list[int]]]:
    """(probability of the mean token, tokens) of the surest of k answers."""
    first = yield Feed(prompt, range(len(prompt)), sample_at=[len(prompt) - 1], want_logits=True)
    chances = first.logits[0].float().log_softmax(-1).topk(k)
    answers = [[token] for token in chances.indices.tolist()]
    logprobs = [[chance] for chance in chances.values.tolist()]
    open_ = list(range(k))
    reach = {(branch + 1, 0): Reach.ALL for branch in open_} | {
        (b + 1, b + 1): Reach.CAUSAL for b in open_
    }
    for step in range(tokens - 1):
        predicted = yield Feed(
            [answers[branch][-1] for branch in open_],
            [len(prompt) + step] * len(open_),
            segments=[branch + 1 for branch in open_],
            reach=reach if step == 0 else {},
            sample_at=range(len(open_)),
        )
        for branch, token, logprob in zip(open_, predicted.tokens, predicted.logprobs, strict=True):
            answers[branch].append(token)
            logprobs[branch].append(logprob)
        open_ = [branch for branch in open_ if answers[branch][-1] != end]
        if not open_:
            break
    return max((sum(own) / len(own), answer) for own, answer in zip(logprobs, answers, strict=True))


loaded = load_model(ModelConfig(name="smollm2-135m-instruct"))
engine = Engine(loaded.model)
for question in ("Which is the largest planet?", "How many legs has a spider?"):
    prompt = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
    )
    engine.submit(
        cot_decoding(prompt, k=4, tokens=32, end=loaded.tokenizer.eos_token_id), tag=question
    )
while engine.pending:
    for done in engine.step():
        logprob, answer = done.answer
        print(
            f"{done.tag} {loaded.tokenizer.decode(answer, skip_special_tokens=True)} "
            f"({logprob:.2f} a token)"
        )
