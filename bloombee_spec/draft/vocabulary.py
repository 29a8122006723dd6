"""Whether a drafter speaks the target's language: the same token ids for the same text."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)

PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    " leading space, trailing space ",
    "def f(x: int) -> str:\n    return f'{x!r:>10}'\n\n\tif x:\r\n",
    "3.14159 1234567890 1,000,000 0x7fff 2026-08-01",
    '{"name": "a_b-c", "list": [1, 2, 3], "ok": true}',
    "naïve café Straße Ωμέγα привет 你好世界 こんにちは مرحبا",
    "\N{GRINNING FACE}\N{FAMILY} <|endoftext|></s>[INST]",
    "https://example.org/a?b=c&d=%20#e",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "\n\n\n   \t  \n",
)


def check_same_vocabulary(
    target_tokenizer: Any | None, draft_tokenizer: Any | None, target_size: int, draft_size: int
) -> int:
    """How many ids both models know, given that these ids mean the same to both.

    Equal sizes prove nothing, and different ones may be nothing but padding, so that tokenizers are compared by what
    they do.

    :param target_tokenizer: tokenizers are Hugging Face ones; without both of them the sizes must be equal
    :param target_size: rows of the target's LM head
    :param draft_size: rows of the drafter's LM head
    :returns: the drafter must not propose ids from here on
    :raises ValueError: the vocabularies differ, or it cannot be told
    """
    if target_tokenizer is None or draft_tokenizer is None:
        if target_size != draft_size:
            raise ValueError(
                f"the target has {target_size} token ids and the drafter {draft_size}; pass both tokenizers to show "
                "that the difference is only padding"
            )
        logger.warning(
            "The vocabularies of target and drafter have the same size, but were not compared: no tokenizers"
        )
        return target_size
    for probe in PROBES:
        target_ids, draft_ids = _encode(target_tokenizer, probe), _encode(draft_tokenizer, probe)
        if target_ids != draft_ids:
            raise ValueError(
                f"the tokenizer of the drafter is not the target's: {probe!r} is {draft_ids} instead of {target_ids}, "
                "so choose a drafter of the target's family"
            )
    known = len(target_tokenizer)
    if min(target_size, draft_size) < min(known, len(draft_tokenizer)):
        raise ValueError(
            f"the tokenizers know {known} and {len(draft_tokenizer)} token ids, but the target has {target_size} rows "
            f"and the drafter {draft_size}"
        )
    return min(target_size, draft_size)


def _encode(tokenizer: Any, text: str) -> list[int]:
    return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
