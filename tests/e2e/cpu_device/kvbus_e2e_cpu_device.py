"""Test support: a stand-in for the device connector, so that LMCache 0.4.3 runs under vLLM 0.18 on a CPU.

LMCache knows CUDA, XPU and HPU pages only. This puts a fourth kind in their place, in the test's own processes, through
vLLM's plugin mechanism. Nothing of it is part of the product.

Shapes: vLLM's CPU page tensor of one layer is [2, blocks, kv_heads, block_size, head_dim]; LMCache's memory object of
one chunk is [2, layers, tokens, kv_heads x head_dim]. Within one block and head, vLLM's CPU kernels keep the elements
in an order of their own, which depends on the machine: `learn_order` finds it out with vLLM's own writer.
"""

from __future__ import annotations

from typing import Any

import torch


class CpuDevice:
    """What LMCache asks of torch.cuda when it starts."""

    @staticmethod
    def set_device(rank: int) -> None:
        return

    @staticmethod
    def device_count() -> int:
        return 8  # at least the world size: all ranks are on this machine


def stand_in() -> None:
    """Put the stand-ins where LMCache looks its device up. May be called more than once."""
    import lmcache.integration.vllm.utils as vllm_utils
    import lmcache.v1.gpu_connector as gpu_connector
    from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
    from lmcache.v1.kv_layer_groups import KVLayerGroupsManager

    if getattr(gpu_connector, "kvbus_e2e_stand_in", False):
        return

    class CpuPagesConnector(GPUConnectorInterface):
        """Copies between chunks and vLLM's CPU pages."""

        def __init__(self, kv_shape: tuple[int, ...]) -> None:
            self._layers, self._kv, _, self._heads, self._head_dim = kv_shape
            self._head_numbers = torch.arange(self._heads)[None, :, None]
            self._order: list[torch.Tensor] | None = None

        def get_shape(self, num_tokens: int) -> torch.Size:
            return torch.Size([self._kv, self._layers, num_tokens, self._heads * self._head_dim])

        def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
            for layer, pages in enumerate(kwargs["kvcaches"]):
                block, places = self._places(pages, kwargs["slot_mapping"][start:end])
                for half in range(self._kv):
                    found = pages[half].flatten(2)[block[:, None, None], self._head_numbers, places[half]]
                    memory_obj.tensor[half, layer] = found.flatten(1)

        def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
            for layer, pages in enumerate(kwargs["kvcaches"]):
                block, places = self._places(pages, kwargs["slot_mapping"][start:end])
                for half in range(self._kv):
                    chunk = memory_obj.tensor[half, layer].view(end - start, self._heads, self._head_dim)
                    pages[half].flatten(2)[block[:, None, None], self._head_numbers, places[half]] = chunk

        def _places(self, pages: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
            """Block of each token, and for K and V where in the block its elements are: [tokens, 1, head_dim]."""
            if self._order is None:
                self._order = learn_order(pages)
            size = pages.shape[3]  # a slot is block x size + number in the block
            return slots // size, [order[slots % size][:, None, :] for order in self._order]

        def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
            for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
                self.from_gpu(memory_obj, start, end, **kwargs)

        def batched_to_gpu(self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **kwargs: Any) -> None:
            for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
                self.to_gpu(memory_obj, start, end, **kwargs)

    original_build = KVLayerGroupsManager.build_kv_layer_groups

    def build_kv_layer_groups(self: Any, kv_caches: dict[str, torch.Tensor]) -> None:
        # LMCache reads the size of a token from the last two dimensions: heads and head_dim.
        original_build(self, {name: pages.transpose(2, 3) for name, pages in kv_caches.items()})

    KVLayerGroupsManager.build_kv_layer_groups = build_kv_layer_groups
    vllm_utils.get_vllm_torch_dev = lambda: (CpuDevice, "cpu")
    gpu_connector.CreateGPUConnector = lambda config, metadata, *_args, **_kwargs: CpuPagesConnector(metadata.kv_shape)
    gpu_connector.kvbus_e2e_stand_in = True  # type: ignore[attr-defined]


def learn_order(pages: torch.Tensor) -> list[torch.Tensor]:
    """Where vLLM's kernels put the elements of one block of one head, for K and for V: [block_size, head_dim]."""
    from vllm import _custom_ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    _, _, _, size, dim = pages.shape
    assert (pages.dtype, size * dim <= 0x4000) == (torch.bfloat16, True)
    # Every element a different finite bit pattern: found again, it tells its place.
    numbered = (torch.arange(size * dim, dtype=torch.int16) + 0x2000).view(pages.dtype).view(size, 1, dim)
    block = torch.zeros(2, 1, 1, size, dim, dtype=pages.dtype)
    isa = _get_attn_isa(pages.dtype, size, dim)
    _custom_ops.cpu_attn_reshape_and_cache(numbered, numbered, block[0], block[1], torch.arange(size), isa)
    orders = []
    for half in block.view(torch.int16):
        order = torch.empty(size * dim, dtype=torch.long)
        order[half.flatten().long() - 0x2000] = torch.arange(size * dim)
        orders.append(order.view(size, dim))
    return orders
