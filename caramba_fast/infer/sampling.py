"""Sampling: from logits to the next token. Greedy, temperature, top-k, top-p, min-p, typical."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from caramba_fast.infer.config import GenerateConfig
from caramba_fast.infer.fields import GREEDY_BELOW

#: Most likely tokens that filters try before they sort the whole vocabulary.
FIRST_FEW = 256
#: Token id where none can be chosen. It is read back with the others, so that checking costs no extra sync.
NOTHING = -1
#: Source of random numbers: a generator, None for torch's global one, or (B,) float64 in [0, 1), one per row.
Randomness = torch.Generator | Tensor | None


class RandomStream:
    """The random numbers of one sequence, in the order in which it would draw them alone.

    Attributes:
        taken: how many are used up.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._device = seed, device
        self.rewind(0)

    def ahead(self, count: int) -> list[float]:
        """The next ``count`` numbers; they are the same until marked as `used`."""
        exact = torch.float32 if self._device.type == "mps" else torch.float64
        while len(self._drawn) < count:
            one = torch.rand((1, 1), generator=self._rng, dtype=exact, device=self._device)
            self._drawn.append(float(one))
        return self._drawn[:count]

    def rewind(self, taken: int) -> None:
        """Goes back to the state after ``taken`` numbers."""
        self._rng = torch.Generator(device=self._device).manual_seed(self._seed)
        self._drawn: list[float] = []
        self.ahead(taken)
        self._drawn.clear()
        self.taken = taken

    def used(self, count: int) -> None:
        """Marks the next ``count`` numbers as used."""
        del self._drawn[:count]
        self.taken += count


def random_state(generator: torch.Generator | None) -> Tensor | None:
    """State of a generator; None for torch's global one, which is left alone."""
    return None if generator is None else generator.get_state()


def current_state(generator: torch.Generator | None, device: torch.device) -> bytes:
    """State of a generator, or of torch's global one for a device."""
    if generator is not None:
        state = generator.get_state()
    elif device.type == "cuda":
        state = torch.cuda.get_rng_state(device)
    else:
        state = torch.get_rng_state()
    return state.numpy().tobytes()


def set_random_state(generator: torch.Generator | None, state: Tensor | None) -> None:
    """Restores a `random_state`."""
    if generator is not None and state is not None:
        generator.set_state(state)


def filtered_logits(logits: Tensor, config: GenerateConfig) -> Tensor:
    """Logits (..., V) float32 after temperature (at least GREEDY_BELOW) and filters; removed tokens are -inf."""
    scores = logits.to(torch.float32) / config.temperature
    if config.top_k is not None and config.top_k < scores.shape[-1]:
        least = scores.topk(config.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if config.top_p is not None and config.top_p < 1.0:
        scores = _nucleus(scores, config.top_p)
    for name, filtered in FILTERS.items():
        setting = getattr(config, name)
        if setting:
            scores = filtered(scores, setting)
    return scores


def _beyond(before: Tensor, most: float) -> Tensor:
    """Tokens to remove, given the probability before each; the first stays, even if ``most`` is 0 in float32."""
    return (before >= most) & (before > 0)


def _nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Keeps the most likely tokens up to ``top_p``; sorts all of a row only if its `FIRST_FEW` do not reach it.

    ``topk`` and ``sort`` may order equally likely tokens differently, so which is used depends on the row alone.
    """
    probability = scores.softmax(-1)
    ordered, index = probability.topk(min(FIRST_FEW, scores.shape[-1]))
    drop = _outside(ordered, index, scores.shape[-1], top_p)
    enough = ordered.sum(-1, keepdim=True) >= top_p
    if not bool(enough.all()):
        ordered, index = probability.sort(dim=-1, descending=True)
        drop = drop.where(enough, _outside(ordered, index, scores.shape[-1], top_p))
    return scores.masked_fill(drop, -torch.inf)


def _outside(ordered: Tensor, index: Tensor, vocabulary: int, top_p: float) -> Tensor:
    """(..., vocabulary) bool: all tokens but the first whose probabilities, ``ordered`` (..., N), reach ``top_p``."""
    drop = index.new_ones((*index.shape[:-1], vocabulary), dtype=torch.bool)
    return drop.scatter_(-1, index, _beyond(ordered.cumsum(-1) - ordered, top_p))


def _likely(scores: Tensor, min_p: float) -> Tensor:
    """Keeps tokens at least ``min_p`` times as likely as the most likely one."""
    probability = scores.softmax(-1)
    least = probability.amax(-1, keepdim=True) * min_p
    return scores.masked_fill(probability < least, -torch.inf)


def _typical(scores: Tensor, typical_p: float) -> Tensor:
    """Keeps the tokens whose surprisal is nearest to the entropy, up to ``typical_p`` (arXiv:2202.00666)."""
    if typical_p >= 1.0:
        return scores
    log_p = scores.log_softmax(-1)
    p = log_p.exp()
    entropy = -(p * log_p).nansum(-1, keepdim=True)
    distance = (-log_p - entropy).abs()
    nearest, order = distance.sort(-1)  # removed tokens have infinite surprisal: last
    ordered = p.gather(-1, order)
    kept = ~_beyond(ordered.cumsum(-1) - ordered, typical_p)
    last = nearest.gather(-1, kept.sum(-1, keepdim=True) - 1)
    return scores.masked_fill(distance > last, -torch.inf)  # ties with the last one stay


#: Filters after top_k and top_p, in order, by the setting that turns them on.
FILTERS: dict[str, Callable[[Tensor, float], Tensor]] = {"min_p": _likely, "typical_p": _typical}


def probabilities(scores: Tensor, config: GenerateConfig) -> Tensor:
    """The distribution tokens are drawn from, (..., V) float32; one-hot if the config is greedy."""
    if not config.samples:
        return torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).to(torch.float32)
    return filtered_logits(scores, config).softmax(-1)


def sample(logits: Tensor, config: GenerateConfig, generator: Randomness) -> Tensor:
    """Next token ids (B,) int64 for logits (B, V).

    Raises:
        ValueError: every token of a row was removed, or its logits are not finite; the message names the row.
    """
    tokens = sample_marked(logits, config, generator)
    check_chosen(tokens.tolist(), logits, logits)
    return tokens


def sample_marked(logits: Tensor, config: GenerateConfig, generator: Randomness) -> Tensor:
    """As `sample`, but `NOTHING` where it raises; the caller reads the tokens and then calls `check_chosen`."""
    if not config.samples:
        return likeliest(logits)
    return _drawn_from_few(logits, config, generator)


def likeliest(logits: Tensor) -> Tensor:
    """Ids (...) int64 of the largest of logits (..., V); `NOTHING` where that is NaN or infinite."""
    if logits.device.type == "cpu":  # argmax of half precision is slower there
        logits = logits.float()
    index = logits.argmax(-1)
    largest = logits.gather(-1, index[..., None])[..., 0]
    return index.masked_fill(~largest.isfinite(), NOTHING)


def check_chosen(
    tokens: Sequence[int],
    logits: Tensor,
    scores: Tensor,
    new: Sequence[int] | None = None,
    model: str = "model",
) -> None:
    """Raises ValueError if a row's token is `NOTHING`, naming the row, the step and the cause.

    Args:
        tokens: (B,), the chosen tokens.
        logits, scores: (B, V), the model's logits, and those after processing.
        new: tokens each row had generated before, if known.
        model: name of the model for the message.
    """
    if NOTHING in tokens:
        row = list(tokens).index(NOTHING)
        step = "" if new is None else f", new token {new[row] + 1}"
        why = why_nothing(logits[row], scores[row], model)
        raise ValueError(f"row {row}{step}: no token can be chosen: {why}")


def why_nothing(logits: Tensor, scores: Tensor, model: str = "model") -> str:
    """Why no token can be chosen from logits and scores, (V,) or (N, V)."""
    unsound = int((logits.isnan() | logits.isposinf()).sum())
    if unsound:
        return f"the {model}'s logits are not finite: {unsound} of {logits.numel()} are NaN or +inf"
    if bool(logits.isneginf().all(-1).any()):
        return f"the {model}'s logits are all -inf"
    if bool((scores.isnan() | scores.isposinf()).any()):
        return "a logits processor made scores that are not finite (NaN or +inf)"
    return (
        "every token was removed by the settings (suppress_tokens, bad_words_ids, "
        "no_repeat_ngram_size, logit_bias, a logits processor)"
    )


def _drawn_from_few(logits: Tensor, config: GenerateConfig, generator: Randomness) -> Tensor:
    """Draws from the filtered distribution; from the `FIRST_FEW` most likely tokens alone if they hold all of it.

    A random number gives another token there than in the whole vocabulary, so which is used depends on the row alone
    and never on the rest of the batch.
    """
    few = min(FIRST_FEW, logits.shape[-1])
    unlimited = config.top_k is None and config.top_p is None
    others = any(getattr(config, name) for name in FILTERS)
    if unlimited or others or (config.top_k or 0) >= few:
        return draw_marked(filtered_logits(logits, config).softmax(-1), generator)
    scores = logits.to(torch.float32) / config.temperature
    values, index = scores.topk(few)
    if config.top_k is not None:  # and ties with the k-th, as in `filtered_logits`
        values = values.masked_fill(values < values[..., config.top_k - 1, None], -torch.inf)
    whole = scores if config.top_k is None else values
    probability = (values - whole.logsumexp(-1, keepdim=True)).exp()
    points = _points(logits, generator)
    # With top_k: whether no token beyond the few ties with the k-th.
    enough = values[..., -1].isneginf()
    if config.top_p is not None:
        if config.top_k is None:
            enough = probability.sum(-1) >= config.top_p
        before = probability.cumsum(-1) - probability
        probability = probability.masked_fill(_beyond(before, config.top_p), 0.0)
    place = draw_marked(probability, points)
    found = index.gather(-1, place.clamp(min=0)[..., None])[..., 0].where(place >= 0, place)
    if few < logits.shape[-1] and not bool(enough.all()):
        among_all = draw_marked(filtered_logits(logits, config).softmax(-1), points)
        found = found.where(enough, among_all)
    return found


def draw_again(
    logits: Tensor, generator: torch.Generator | None, start: Tensor | None, count: int
) -> None:
    """Sets a generator to its state after ``count`` steps from ``start``, with logits like these (..., V).

    Numbers drawn for tokens that were dropped are so used for the next ones.
    """
    set_random_state(generator, start)
    for _ in range(count if start is not None else 0):
        _points(logits, generator)


def _points(logits: Tensor, generator: Randomness) -> Tensor:
    """A random number for each row of logits (..., V)."""
    if isinstance(generator, Tensor):
        return generator
    exact = torch.float32 if logits.device.type == "mps" else torch.float64
    return torch.rand(logits.shape[:-1], generator=generator, dtype=exact, device=logits.device)


def draw(probability: Tensor, generator: Randomness) -> Tensor:
    """Ids (...) int64 drawn from probabilities (..., V), which need not add up to 1.

    Inverts the cumulative sum: one random number per row, and several times faster than ``torch.multinomial`` for a
    few rows on a CPU.

    Raises:
        ValueError: the probabilities of a row are NaN, or all 0.
    """
    tokens = draw_marked(probability, generator)
    if bool((tokens == NOTHING).any()):
        raise ValueError("no token can be drawn: its probabilities are NaN, or all 0")
    return tokens


def draw_marked(probability: Tensor, generator: Randomness) -> Tensor:
    """As `draw`, with `NOTHING` where it raises."""
    flat = probability.reshape(-1, probability.shape[-1])
    exact = torch.float32 if flat.device.type == "mps" else torch.float64
    reached = flat.cumsum(-1, dtype=exact)
    total = reached[:, -1:]
    point = _points(probability, generator).to(total).view(total.shape) * total
    # The first step of the cumulative sum beyond the point; tokens without probability make no step.
    below = torch.nextafter(total, torch.zeros_like(total))
    drawn = torch.searchsorted(reached, torch.minimum(point, below), right=True)
    drawn = drawn.masked_fill(~((total > 0.0) & total.isfinite()), NOTHING)
    return drawn.view(probability.shape[:-1])


__all__ = ["GREEDY_BELOW", "NOTHING", "draw", "filtered_logits", "probabilities", "sample"]
