"""A real LMCacheEngine on the CPU: for a worker without vLLM, for tests, for benchmarks.

Real DDR pool, real files. In place of a device stands one CPU tensor: `store` copies KV out of it and `retrieve` copies
KV into it, so that bytes can be compared.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import torch
from lmcache.v1.cache_engine import LMCacheEngine, LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface, VLLMPagedMemLayerwiseGPUConnector
from lmcache.v1.metadata import LMCacheMetadata

from kvbus.protocol.hashes import ChunkHash

Tags = tuple[tuple[str, str], ...]


class CpuEngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank's engine holds and where. One chunk has
    (1 if use_mla else 2) x layers x chunk_size x kv_heads x head_size values of `dtype`.

    instance_id: unique in the process. disk_dir: None means no SSD tier. extra: LMCache's extra_config.
    """

    instance_id: str
    model: str = "kvbus-demo"
    rank: int = 0
    world_size: int = 1
    chunk_size: int = 64
    layers: int = 4
    kv_heads: int = 2
    head_size: int = 32
    dtype: str = "float16"
    cpu_gb: float = 0.1
    local_cpu: bool = True
    disk_dir: Path | None = None
    disk_gb: float = 5.0
    cache_policy: str = "LRU"
    save_unfull_chunk: bool = False
    use_layerwise: bool = False
    use_mla: bool = False
    async_loading: bool = False
    extra: dict[str, Any] | None = None

    @property
    def kv_shape(self) -> tuple[int, int, int, int, int]:
        """LMCache's own order: layers, 2 (1 with MLA), tokens a chunk, heads, head size."""
        return (self.layers, 1 if self.use_mla else 2, self.chunk_size, self.kv_heads, self.head_size)

    @property
    def chunk_bytes(self) -> int:
        layers, kv, tokens, heads, size = self.kv_shape
        return int(layers * kv * tokens * heads * size * self.torch_dtype.itemsize)

    @property
    def torch_dtype(self) -> torch.dtype:
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype)
        return found


class CopyingConnector(GPUConnectorInterface):  # type: ignore[misc]
    """Copies between LMCache's memory objects and a CPU tensor `kv` of [kv, layers, tokens, heads x head size]."""

    load_stream = None  # with MLA the engine would otherwise make a CUDA stream

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        memory_obj.tensor.copy_(kwargs["kv"][:, :, start:end])

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        kwargs["kv"][:, :, start:end].copy_(memory_obj.tensor)

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(memory_obj, start, end, **kwargs)

    def batched_to_gpu(self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **kwargs: Any) -> None:
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(memory_obj, start, end, **kwargs)

    def get_shape(self, num_tokens: int) -> torch.Size:
        raise NotImplementedError("only layerwise storing asks for a shape")


class CopyingLayerwiseConnector(VLLMPagedMemLayerwiseGPUConnector):  # type: ignore[misc]
    """The same, a layer at a time. A subclass of vLLM's connector only because LMCache asserts that it is one."""

    def __init__(self, layers: int, kv: int, hidden: int) -> None:
        # Not super().__init__(): it makes CUDA streams.
        self.num_layers = layers
        self._kv, self._hidden = kv, hidden

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([num_tokens, self._kv, self._hidden])

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> Generator[None, None, None]:
        for layer in range(self.num_layers):
            for memory_obj, start, end in zip(memory_objs[layer], starts, ends, strict=True):
                memory_obj.tensor.copy_(kwargs["kv"][:, layer, start:end].transpose(0, 1))
            yield
        yield

    def batched_to_gpu(self, starts: Any, ends: Any, **kwargs: Any) -> Generator[None, Any, None]:
        for layer in range(self.num_layers):
            memory_objs = yield
            for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
                kwargs["kv"][:, layer, start:end].copy_(memory_obj.tensor.transpose(0, 1))
        yield
        yield


class CpuEngine:
    """One rank's LMCacheEngine with the few calls that a serving engine would make. Close it, or use it in `with`."""

    def __init__(self, config: CpuEngineConfig) -> None:
        self.config = config
        layers, kv, _tokens, heads, size = config.kv_shape
        self._hidden = heads * size
        connector = CopyingLayerwiseConnector(layers, kv, self._hidden) if config.use_layerwise else CopyingConnector()
        self.engine: LMCacheEngine = LMCacheEngineBuilder.get_or_create(
            config.instance_id,
            _engine_config(config),
            _metadata(config),
            connector,
            lambda _tensor, _source: None,
            lambda thing, _source: thing,
        )
        self.engine.post_init()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine's threads and give its pool back; the files stay. Calling it twice is harmless."""
        if LMCacheEngineBuilder.get(self.config.instance_id) is self.engine:
            LMCacheEngineBuilder.destroy(self.config.instance_id)
            manager = self.engine.storage_manager
            if manager is not None and not manager.loop.is_running():
                manager.loop.close()  # LMCache stops its loop and leaves its sockets open

    def empty_kv(self, tokens: int) -> torch.Tensor:
        """Zeros of the shape that `store` takes: [kv, layers, tokens, heads x head size]."""
        layers, kv, _, _, _ = self.config.kv_shape
        return torch.zeros((kv, layers, tokens, self._hidden), dtype=self.config.torch_dtype)

    def random_kv(self, tokens: int, seed: int) -> torch.Tensor:
        """Reproducible finite values of the shape that `store` takes."""
        generator = torch.Generator().manual_seed(seed)
        empty = self.empty_kv(tokens)
        return torch.rand(empty.shape, generator=generator, dtype=torch.float32).to(empty.dtype)

    def chunk_hashes(self, tokens: Sequence[int]) -> list[ChunkHash]:
        """The hashes of the tokens' chunks, as this engine makes them."""
        return [found for _, _, found in self.engine.token_database.process_tokens(list(tokens), make_key=False)]

    def store(self, tokens: Sequence[int], kv: torch.Tensor, *, skip: int = 0, tags: Tags = ()) -> None:
        """Store a text's KV as a finished prefill would; writing to the SSD goes on in the background.

        skip: leading tokens, whole chunks, that need no storing because a lookup has found them.
        """
        mask = torch.ones(len(tokens), dtype=torch.bool)
        mask[:skip] = False
        given = {"kv": kv, "mask": mask, "request_configs": _request_configs(tags)}
        if not self.config.use_layerwise:
            self.engine.store(list(tokens), **given)
            return
        for _ in self.engine.store_layer(list(tokens), **given):
            pass

    def retrieve(self, tokens: Sequence[int], *, tags: Tags = ()) -> tuple[int, torch.Tensor]:
        """How many leading tokens were found, and a tensor like `store`'s with their KV (zeros behind)."""
        kv = self.empty_kv(len(tokens))
        given = {"kv": kv, "request_configs": _request_configs(tags), "req_id": "kvbus"}
        if not self.config.use_layerwise:
            return int(self.engine.retrieve(list(tokens), **given).sum()), kv
        if not self.lookup(tokens, tags=tags):  # retrieve_layer() of 0.4.3 fails where nothing is found
            return 0, kv
        *_, mask = self.engine.retrieve_layer(list(tokens), **given)
        return int(mask.sum()), kv

    def lookup(self, tokens: Sequence[int], *, tags: Tags = ()) -> int:
        """How many leading tokens the engine holds in any tier; nothing is pinned."""
        return int(self.engine.lookup(tokens=list(tokens), request_configs=_request_configs(tags)))

    def wait_stored(self, timeout: float = 30.0) -> None:
        """Wait until no file is being written any more. Raises TimeoutError."""
        disk = self.engine.storage_manager and self.engine.storage_manager.storage_backends.get("LocalDiskBackend")
        deadline = time.monotonic() + timeout
        while disk is not None and disk.disk_worker.put_tasks:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(disk.disk_worker.put_tasks)} files still being written after {timeout} s")
            time.sleep(0.002)


def _engine_config(config: CpuEngineConfig) -> LMCacheEngineConfig:
    return LMCacheEngineConfig.from_defaults(
        chunk_size=config.chunk_size,
        local_cpu=config.local_cpu,
        max_local_cpu_size=config.cpu_gb,
        local_disk=None if config.disk_dir is None else str(config.disk_dir),
        max_local_disk_size=config.disk_gb if config.disk_dir is not None else 0.0,
        cache_policy=config.cache_policy,
        save_unfull_chunk=config.save_unfull_chunk,
        use_layerwise=config.use_layerwise,
        enable_async_loading=config.async_loading,
        lmcache_instance_id=config.instance_id,
        extra_config=dict(config.extra or {}),
    )


def _metadata(config: CpuEngineConfig) -> LMCacheMetadata:
    return LMCacheMetadata(
        model_name=config.model,
        world_size=config.world_size,
        local_world_size=config.world_size,
        worker_id=config.rank,
        local_worker_id=config.rank,
        kv_dtype=config.torch_dtype,
        kv_shape=config.kv_shape,
        use_mla=config.use_mla,
        role="worker",
        chunk_size=config.chunk_size,
    )


def _request_configs(tags: Tags) -> dict[str, str] | None:
    return {f"lmcache.tag.{name}": value for name, value in tags} or None
