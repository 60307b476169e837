"""Write your own decoding method: a generator that says which tokens are fed, and who sees whom.

The engine does everything else.

The example is CoT-decoding (Wang and Zhou, 2024). The k most likely first tokens each start an
answer, all answers are decoded greedily, and the most confident one wins. Here, the k answers are
segments of one sequence. Each sees the prompt and itself, and a pass decodes one token of each.

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
    """Decode k answers, and return the most confident one.

    Args:
        prompt: Token ids of the prompt.
        k: Number of answers.
        tokens: Limit of the tokens of an answer.
        end: The token id that ends an answer.

    Returns:
        The mean log probability of its tokens, and its token ids.
    """
    first = yield Feed(prompt, range(len(prompt)), sample_at=[len(prompt) - 1], want_logits=True)
    top = first.logits[0].float().log_softmax(-1).topk(k)
    answers = [[token] for token in top.indices.tolist()]
    logprobs = [[logprob] for logprob in top.values.tolist()]
    # Segment 0 is the prompt, and segment i + 1 is answer i.
    reach = {}
    for answer in range(k):
        reach[answer + 1, 0] = Reach.ALL
        reach[answer + 1, answer + 1] = Reach.CAUSAL
    unfinished = list(range(k))
    for step in range(tokens - 1):
        predicted = yield Feed(
            [answers[answer][-1] for answer in unfinished],
            [len(prompt) + step] * len(unfinished),
            segments=[answer + 1 for answer in unfinished],
            reach=reach if step == 0 else {},
            sample_at=range(len(unfinished)),
        )
        for index, answer in enumerate(unfinished):
            answers[answer].append(predicted.tokens[index])
            logprobs[answer].append(predicted.logprobs[index])
        unfinished = [answer for answer in unfinished if answers[answer][-1] != end]
        if not unfinished:
            break
    means = [sum(values) / len(values) for values in logprobs]
    return max(zip(means, answers, strict=True))


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
    for finished in engine.step():
        logprob, answer = finished.answer
        text = loaded.tokenizer.decode(answer, skip_special_tokens=True)
        print(f"{finished.tag} {text} ({logprob:.2f} per token)")
