"""Test support: a stand-in for the device connector, so that LMCache 0.4.3 runs under vLLM 0.18 on a CPU.

LMCache knows CUDA, XPU and HPU pages only. This puts a fourth kind in their place, in the test's own processes, through
vLLM's plugin mechanism. Nothing of it is part of the product.

Shapes: vLLM's CPU page tensor of one layer is [2, blocks, kv_heads, block_size, head_dim]; LMCache's memory object of
one chunk is [2, layers, tokens, kv_heads x head_dim].
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

        def get_shape(self, num_tokens: int) -> torch.Size:
            return torch.Size([self._kv, self._layers, num_tokens, self._heads * self._head_dim])

        def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
            for layer, pages in enumerate(kwargs["kvcaches"]):
                block, offset = _slots(pages, kwargs["slot_mapping"][start:end])
                found = pages[:, block, :, offset, :]  # [tokens, 2, heads, dim]
                memory_obj.tensor[:, layer] = found.transpose(0, 1).reshape(self._kv, end - start, -1)

        def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
            for layer, pages in enumerate(kwargs["kvcaches"]):
                block, offset = _slots(pages, kwargs["slot_mapping"][start:end])
                chunk = memory_obj.tensor[:, layer].view(self._kv, end - start, self._heads, self._head_dim)
                pages[:, block, :, offset, :] = chunk.transpose(0, 1)

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


def _slots(pages: torch.Tensor, slot_mapping: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Block and place in the block of each token. A slot is block x block_size + place."""
    size = pages.shape[3]
    return slot_mapping // size, slot_mapping % size
