"""Whether sampled texts have the distribution that the stock model gives them."""

from collections import Counter

import torch

from raypd.decoding.sampling import probabilities
from tests.decoding import reference


def chance_of_texts(stock, prompt, length, sampling):
    """{text: probability} of every continuation of `length` tokens, one token at a time by the stock model."""
    texts = {(): 1.0}
    for _ in range(length):
        longer = {}
        for text, chance in texts.items():
            logits = reference.plain_output(stock, [*prompt, *text])[0][-1]
            for token, p in enumerate(probabilities(logits, sampling).tolist()):
                if p > 0:
                    longer[*text, token] = chance * p
        texts = longer
    return texts


def check_logprobs(stock, prompt, answer):
    """Sampled tokens have the log-probabilities of the stock model."""
    logprobs = reference.plain_output(stock, [*prompt, *answer.tokens])[0].log_softmax(-1)[len(prompt) - 1 : -1]
    chosen = logprobs[range(len(answer.tokens)), answer.tokens]
    torch.testing.assert_close(torch.tensor(answer.logprobs), chosen, atol=1e-3, rtol=0)


def check_distribution(answers, chances, least_freedom):
    """Within 4 standard deviations of what chi-square gives (Wilson and Hilferty's cube root is close to normal), cells
    that expect fewer than 5 put together."""
    counts = Counter(tuple(answer.tokens) for answer in answers)
    assert set(counts) <= set(chances), "a text that one token at a time never says"
    cells = [(counts.get(text, 0), len(answers) * chance) for text, chance in chances.items()]
    small = [sum(column) for column in zip(*(cell for cell in cells if cell[1] < 5), strict=True)]
    cells = [cell for cell in cells if cell[1] >= 5] + [small] * bool(small)
    statistic, freedom = sum((c - e) ** 2 / e for c, e in cells if e > 0), len(cells) - 1
    assert freedom > least_freedom
    spread = 2 / (9 * freedom)
    assert ((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5 < 4, (statistic, freedom)
