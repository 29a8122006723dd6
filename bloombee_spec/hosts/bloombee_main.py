"""BloomBee's main branch (2.3.0.dev2): Petals' lineage with a KV cache of its own, counted in tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from hivemind.utils.tensor_descr import TensorDescriptor

from bloombee_spec.hosts.container import StageContainer
from bloombee_spec.hosts.petals_like import PetalsLikeHost


@dataclass(frozen=True, slots=True)
class Share:
    """One tensor of an allocation that the host knows as `handle`."""

    handle: int
    index: int
    descriptor: TensorDescriptor


class TokenCache:
    """The plugin's KV under the host's accounting.

    The host's cache counts tokens, and what it allocates for them are pairs of half-precision slabs in its own layout,
    whatever the model's dtype. So a session asks it for as many tokens as its lanes have columns, with slabs one value
    wide, and the tensors themselves, in the model's dtype, are kept here for as long as the host keeps the slabs.

    :param manager: the host's `KVCacheManager`
    :param bytes_per_token: of the plugin's KV of one token in all blocks of this server
    """

    def __init__(self, manager: Any, bytes_per_token: int):
        self._manager, self._bytes_per_token = manager, bytes_per_token
        self._tensors: dict[Share, torch.Tensor] = {}

    @property
    def bytes_left(self) -> int:
        return int(self._manager.tokens_left()) * self._bytes_per_token

    @asynccontextmanager
    async def allocate_cache(self, *descriptors: TensorDescriptor, timeout: float) -> Any:
        """As the host's: from another process than the runtime's. Lanes are `[2, blocks, kv_heads, columns, dim]`."""
        tokens = sum(int(descriptor.shape[3]) for descriptor in descriptors)
        slabs = TensorDescriptor((1, 1, 1, tokens), dtype=descriptors[0].dtype, device=descriptors[0].device)
        async with self._manager.allocate_cache(slabs, timeout=timeout) as (handle,):
            yield tuple(Share(handle, index, descriptor) for index, descriptor in enumerate(descriptors))

    @contextmanager
    def use_cache(self, *shares: Share) -> Iterator[tuple[torch.Tensor, ...]]:
        """As the host's: in the runtime's thread only."""
        host = self._manager.cache
        with host.use_cache(*dict.fromkeys(share.handle for share in shares)):
            for gone in [share for share in self._tensors if share.handle not in host._allocated_tensors]:
                del self._tensors[gone]
            for share in shares:
                if share not in self._tensors:  # zeros: hidden columns get no weight, but no weight of NaN is NaN
                    wanted = share.descriptor
                    self._tensors[share] = torch.zeros(wanted.shape, dtype=wanted.dtype, device=wanted.device)
            yield tuple(self._tensors[share] for share in shares)


class MainStageContainer(StageContainer):
    def memory_cache(self: Any, backend: Any) -> TokenCache:
        from bloombee_spec.server.families.registry import family_for

        family = family_for(backend.config)
        values = 2 * len(self.module_backends) * family.kv_heads * family.head_dim
        return TokenCache(backend.cache_manager, values * backend.dtype.itemsize)


class BloomBeeMainHost(PetalsLikeHost):
    name = "bloombee"
    can_rewind = True
    container = MainStageContainer
