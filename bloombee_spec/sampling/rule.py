"""The acceptance rule: which token follows a node, whatever the drafter, the shape of the tree and the timing.

    greedy:    argmax(scores)
    sampling:  argmax(scores - log E),    E = Exp(1) noise keyed by (seed, row, position)

The second line is a race of exponential clocks: `E / p` is smallest for token t with probability p(t), so each token
is an exact draw from softmax(scores); for log-probabilities plus Gumbel noise this is the Gumbel-max trick. Since the
noise is a function of the position, so is the draw: a draft does not take part in it, and matching it is all there is
to "acceptance". The scores include the temperature already (it is one of the processors), so it appears nowhere in
this file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from bloombee_spec.sampling.noise import NoiseCache
from bloombee_spec.sampling.processors import Prefix, ProcessorStack, SamplingError
from bloombee_spec.sampling.spec import SamplingSpec


class KeyedRule:
    """The rule of one stream (one batch row). Not shared between threads.

    The choice depends on the logits of the node, on its prefix, and on (seed, row, position): on nothing that was
    drafted, evaluated or chosen before.

    :param spec: how to sample
    :param vocab_size: width of the logits
    :param row: row of the batch
    :param device: where the logits are
    :param processors: instead of those of the spec, when the client verifies with processors that cannot be sent to a
      stage. Whoever passes stateful ones must call `choose` once per committed position and never for other nodes.
    :raises ValueError: an option names a token outside the vocabulary
    :raises UnsupportedOption: the installed transformers lacks the class for an option
    """

    def __init__(
        self,
        spec: SamplingSpec,
        vocab_size: int,
        *,
        row: int = 0,
        device: torch.device | str = "cpu",
        processors: ProcessorStack | None = None,
    ):
        spec.check_vocabulary(vocab_size)
        self.spec = spec
        self.vocab_size = vocab_size
        self.processors = ProcessorStack.from_spec(spec, device) if processors is None else processors
        self._row, self._device = row, device
        self.noise: NoiseCache | None = None
        self.reseed(spec.seed)
        self.record: Callable[[int, torch.Tensor, torch.Tensor], None] | None = None
        """Told `(position, logits, scores)` of each node, both `[vocab]`; one tensor where nothing was processed."""

    def reseed(self, seed: int) -> None:
        """Draw with another key from here on."""
        if self.spec.do_sample:
            self.noise = NoiseCache(seed, self._row, self.vocab_size, device=self._device)

    def choose(self, logits: torch.Tensor, prefix: Prefix, position: int) -> int:
        """The token at `position`.

        :param logits: `[vocab]` at the node
        :param prefix: the `position` token ids before it: committed tokens and the path to the node (or a function
          that returns them, called only if a processor looks at them)
        :raises SamplingError: NaN among the scores, or no token with a positive probability
        """
        return self.choose_many(logits.unsqueeze(0), [prefix], [position])[0]

    def choose_many(self, logits: torch.Tensor, prefixes: Sequence[Prefix], positions: Sequence[int]) -> list[int]:
        """The tokens at several nodes at once, each exactly as `choose` would choose it.

        :param logits: `[nodes, vocab]`
        """
        if logits.shape != (len(positions), self.vocab_size) or len(prefixes) != len(positions):
            raise ValueError(
                f"expected logits [{len(positions)}, {self.vocab_size}] and as many prefixes, "
                f"got {list(logits.shape)} and {len(prefixes)} prefixes"
            )
        if not positions:
            return []
        if self.noise is None and not self.processors.processors and self.record is None:
            return _checked(*logits.max(dim=-1), sampling=False)
        races = [self._race(*node) for node in zip(logits, prefixes, positions)]
        peaks, tokens = zip(*races)
        return _checked(torch.stack(peaks), torch.stack(tokens), sampling=self.noise is not None)

    def commit(self, position: int) -> None:
        """The token at `position` is decided; its noise is not needed any more."""
        if self.noise is not None:
            self.noise.commit(position)

    def _race(self, logits: torch.Tensor, prefix: Prefix, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Largest score and chosen token at one node, left on the device."""
        if self.processors.needs_prefix:
            prefix = prefix() if callable(prefix) else prefix
            if len(prefix) != position:
                raise ValueError(f"the prefix of position {position} has {len(prefix)} tokens")
        scores = self.processors.scores(logits, prefix)
        if self.record is not None:
            self.record(position, logits, scores)
        peak, token = scores.max(dim=-1)
        if scores is not logits and not self.spec.remove_invalid_values:
            # A ban could have covered a NaN; what it says about the other logits is the same.
            raw_peak = logits.max()
            peak = torch.where(raw_peak.isnan(), raw_peak, peak)
        return peak, token if self.noise is None else race(scores, self.noise.at(position)).argmax(dim=-1)


def race(scores: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """`scores - log E` up to a constant: the argmax over the last dimension is a draw from softmax(scores).

    In float64 and relative to the largest score, as softmax does it, so that no score is large enough to swallow the
    noise.

    :param scores: `[..., vocab]` in log units, -inf where the probability is zero; the largest one finite
    :param noise: `-log E`, `[..., vocab]`; finite, so that a token of probability zero stays at -inf
    """
    peak = scores.amax(dim=-1, keepdim=True).to(torch.float64)
    return (scores - peak).add_(noise)


def propose_keyed(scores: torch.Tensor, noise: torch.Tensor, k: int) -> list[int]:
    """The k tokens with the smallest `E / q`, best first: where a drafter expects the target's race to end.

    Sharing the target's noise makes a draft agree with the target whenever their distributions do. Drafts made so are
    for the keyed rule alone: a rule that compares p with q would be biased by the shared noise.

    :param scores: `[vocab]`, the drafter's scores in log units with its temperature applied; -inf where q is zero
    :param noise: `[vocab]`, `NoiseCache.at(position)` with the target's seed and row
    :returns: fewer than k tokens when fewer have q > 0
    :raises ValueError: the two do not have the same size; NaN among the scores, or no finite one
    """
    if scores.shape != noise.shape or scores.dim() != 1:
        raise ValueError(f"expected scores and noise [vocab], got {list(scores.shape)} and {list(noise.shape)}")
    values, tokens = race(scores, noise).topk(min(k, scores.shape[0]))
    if values.isnan().any():
        raise ValueError("the drafter's scores contain NaN, or nothing finite")
    return [token for value, token in zip(values.tolist(), tokens.tolist()) if value > -math.inf]


def _checked(peaks: torch.Tensor, tokens: torch.Tensor, *, sampling: bool) -> list[int]:
    """Tokens `[nodes]` as a list, after a look at the largest score of each node.

    `max` takes NaN for the largest value, so it cannot hide behind another one. Among equal values `max` and `argmax`
    report the first: that is what makes ties go to the lowest id.
    """
    for value in peaks.tolist():
        if math.isnan(value):
            raise SamplingError("NaN among the logits: the model or the activations that reached it are broken")
        if value == -math.inf:
            raise SamplingError("no token has a positive probability: the options exclude the whole vocabulary")
        if value == math.inf and sampling:
            raise SamplingError(
                "an infinite score: softmax is not defined; lower the penalties or raise the temperature"
            )
    return [int(token) for token in tokens.tolist()]
