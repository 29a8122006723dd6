"""The drop-in class: the host's distributed causal LM, whose `generate` carries many tokens per lap."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from hivemind.utils.logging import get_logger

from bloombee_spec.client.arguments import NotForPlugin, UnsupportedCall, by_name
from bloombee_spec.client.call import Call, read_call
from bloombee_spec.client.output import OutputRows, padded
from bloombee_spec.client.routing import NoPluginRoute
from bloombee_spec.client.session import SpecSession
from bloombee_spec.client.stats import SpecStats
from bloombee_spec.config import SpecConfig
from bloombee_spec.hosts.base import Host, load_host

__all__ = ["AutoDistributedSpecModelForCausalLM", "SpecDecodingMixin", "UnsupportedCall", "spec_model_class"]

logger = get_logger(__name__)


class AutoDistributedSpecModelForCausalLM:
    """Chooses the class by the installed host and the checkpoint's model type."""

    @classmethod
    def from_pretrained(
        cls, model_name_or_path: str, *args: Any, spec: SpecConfig | None = None, drafter: Any = None, **kwargs: Any
    ) -> Any:
        """Everything that the host's class takes, and:

        :param spec: how to decode; the default speculates with the suffix drafter
        :param drafter: short for `SpecConfig(drafter=…)`
        :raises HostError: no supported host is installed
        """
        config = spec or SpecConfig()
        if drafter is not None:
            config = replace(config, drafter=drafter)
        host = load_host()
        base = host.model_class(str(model_name_or_path), **kwargs)
        model = spec_model_class(base).from_pretrained(model_name_or_path, *args, **kwargs)
        model.attach(host, config)
        return model


def spec_model_class(base: type[Any]) -> type[Any]:
    """A subclass of the host's distributed class that decodes through the plugin."""
    from bloombee_spec.client.streaming import StreamingMixin  # which extends the class below

    return type(base.__name__.replace("Distributed", "DistributedSpec", 1), (StreamingMixin, base), {})


class SpecDecodingMixin:
    """`generate` and `inference_session` through the ring or relay; everything else is the host's."""

    spec: SpecConfig
    last_stats: SpecStats | None = None

    def attach(self: Any, host: Host, config: SpecConfig) -> None:
        self.__dict__.update(_spec_host=host, spec=config, last_stats=None, _spec_said=set())
        self.__dict__["_new_drafter"] = lambda: None
        if config.speculate and config.drafter not in (None, "none"):
            from bloombee_spec.draft.registry import drafter_factory

            self.__dict__["_new_drafter"] = drafter_factory(config.drafter, vocab_size=self.config.vocab_size)

    @contextmanager
    def inference_session(self: Any, max_length: int, **kwargs: Any) -> Iterator[Any]:
        """Several `generate` calls on one history; servers keep its KV.

        :param max_length: most tokens per row, prompts included
        """
        with SpecSession(self._spec_host, self, self.spec, max_length, **kwargs) as session, self.use_session(session):
            yield session

    @torch.no_grad()
    def generate(self: Any, inputs: torch.Tensor | None = None, *args: Any, session: Any = None, **kwargs: Any) -> Any:
        """As the host's and transformers' `generate`. What the plugin cannot serve goes the host's own way, and says
        so once;
        with `SpecConfig(strict=True)` it raises.

        :raises UnsupportedCall: strict, and the plugin cannot serve the call; or nobody can on a swarm
        """
        kwargs = by_name(args, kwargs)
        if inputs is None:
            inputs = kwargs.get("input_ids")
        session = session if session is not None else self.active_session
        try:
            if self.spec.mode == "off":
                raise NotForPlugin("mode is off")
            if session is not None and not isinstance(session, SpecSession):
                raise NotForPlugin("the active session is the host's own")
            full = _with_history(inputs, session)
            arguments = _with_mask(kwargs, inputs, full, session)
            call = read_call(self, full, arguments, self.spec.seed, infer_mask=full is inputs)
            if call.rules and self.spec.rule != "keyed":
                raise UnsupportedCall(f"the rule {self.spec.rule} does not go with options that the client evaluates")
            return self._spec_generate(
                call, session, n_previous=full.shape[1] - (0 if inputs is None else inputs.shape[1])
            )
        except (NotForPlugin, NoPluginRoute) as e:
            return self._host_generate(str(e), inputs, (), session, kwargs)

    def _spec_generate(self: Any, call: Call, session: SpecSession | None, n_previous: int) -> Any:
        with self._decoding(call, session) as (active, output):
            for _ in steps(call, active, output):
                pass
            active.output_ids = output.finish()
        return output.result(active.output_ids[:, n_previous:].clone())

    @contextmanager
    def _decoding(self: Any, call: Call, session: SpecSession | None) -> Iterator[tuple[SpecSession, OutputRows]]:
        """The session of a call, its own or the caller's, and where its tokens go; `last_stats` when it ends."""
        started = time.perf_counter()
        own = SpecSession(self._spec_host, self, self.spec, call.longest) if session is None else None
        with own or nullcontext(session) as active:
            assert active is not None
            active.padding = call.padding
            bytes_before = active.ring_bytes
            try:
                yield active, OutputRows(call)
            finally:
                stats = active.statistics(bytes_before, started)
                if own is not None:
                    stats = replace(stats, stages=own.close(), traffic=own.traffic)
                self.last_stats = active.last_stats = stats

    def _host_generate(self: Any, reason: str, inputs: Any, args: Any, session: Any, kwargs: dict[str, Any]) -> Any:
        if self.spec.strict:
            raise UnsupportedCall(f"bloombee-spec cannot serve this call: {reason}")
        if reason not in self._spec_said and self.spec.mode != "off":
            self._spec_said.add(reason)
            logger.warning(f"Decoding through the host's own path: {reason}")
        self.last_stats = None
        kwargs.pop("input_ids", None)
        return super().generate(inputs, *args, session=session, **kwargs)  # type: ignore[misc]

    def close(self: Any) -> None:
        """Stop the host's background threads and processes; the model is not usable afterwards. Never raises."""
        self._spec_host.close(self)


def steps(call: Call, active: SpecSession, output: OutputRows) -> Iterator[None]:
    """Decode; after each step the output has what was committed, and rows that a criterion ended are stopped."""
    for lane, tokens in active.decode(call.requests, call.new_drafter):
        for stopped, kept in output.append(lane, tokens):
            active.stop(stopped, len(call.rows[stopped]) + kept)
        yield


def _with_history(inputs: torch.Tensor | None, session: SpecSession | None) -> Any:
    """The whole token history: what the session holds, then the new input."""
    previous = None if session is None else session.output_ids
    if previous is None:
        return inputs
    return previous if inputs is None else torch.cat([previous, inputs.to(previous.device)], dim=1)


def _with_mask(
    kwargs: dict[str, Any], inputs: torch.Tensor | None, full: torch.Tensor | None, session: SpecSession | None
) -> dict[str, Any]:
    """A mask for the new input alone, or none, is completed by what is known of the session's history."""
    mask = kwargs.get("attention_mask")
    if full is None or full is inputs or session is None or (mask is not None and mask.shape == full.shape):
        return kwargs
    if mask is None:
        mask = full.new_ones(full.shape[0], 0 if inputs is None else inputs.shape[1])
    elif inputs is None or mask.shape != inputs.shape:
        return kwargs
    history = padded(full[:, : full.shape[1] - mask.shape[1]], session.padding)
    return {**kwargs, "attention_mask": torch.cat([history, mask.to(history)], dim=1)}
