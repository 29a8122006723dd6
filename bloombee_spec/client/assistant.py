"""`assistant_model=` and `prompt_lookup_num_tokens=` of a call: the drafter that stands for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bloombee_spec.draft.base import Drafter

DrafterFactory = Callable[[], Drafter | None]


def call_drafter(model: Any, config: Any, kwargs: Mapping[str, Any]) -> DrafterFactory | None:
    """The drafter that this call brings with it; None: the model's own.

    :raises ValueError: the assistant does not fit the target
    """
    assistant = kwargs.get("assistant_model")
    if assistant is not None:
        if getattr(config, "prompt_lookup_num_tokens", None):
            raise ValueError("assistant_model and prompt_lookup_num_tokens are two drafters; give one of them")
        return _of_assistant(model, assistant, kwargs.get("tokenizer"), kwargs.get("assistant_tokenizer"))
    if getattr(config, "prompt_lookup_num_tokens", None):
        from bloombee_spec.draft.suffix import SuffixDrafter

        return SuffixDrafter
    return None


def _of_assistant(model: Any, assistant: Any, tokenizer: Any, assistant_tokenizer: Any) -> DrafterFactory:
    """The last assistant is kept ready, since checking that it can draft trees takes some of its forwards."""
    known = model.__dict__.get("_spec_assistant")
    if known is not None and known[0] is assistant and known[1] is assistant_tokenizer:
        factory: DrafterFactory = known[2]
        return factory
    if not hasattr(assistant, "get_input_embeddings") or getattr(assistant.config, "is_encoder_decoder", False):
        raise ValueError(f"assistant_model is a {type(assistant).__name__}, expected a transformers causal LM")
    from bloombee_spec.draft.model import ModelDrafter

    both = tokenizer is not None and assistant_tokenizer is not None
    try:
        drafter = ModelDrafter(
            assistant,
            vocab_size=model.config.vocab_size,
            tokenizer=tokenizer if both else None,
            draft_tokenizer=assistant_tokenizer if both else None,
        )
    except ValueError as e:
        raise ValueError(
            f"assistant_model cannot draft for this target: {e} (tokenizers are passed as "
            "generate(..., tokenizer=…, assistant_tokenizer=…))"
        ) from None
    made: DrafterFactory = drafter.fork
    model.__dict__["_spec_assistant"] = (assistant, assistant_tokenizer, made)
    return made
