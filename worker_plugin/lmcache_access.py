"""Everything of LMCache that kvbus touches, in one place, and the check that the installed LMCache has it.

Each Protocol below names one of LMCache's objects and exactly those attributes, methods and parameters that
worker_plugin uses: the type checker refuses a use that is not listed, and `verify` compares the same list with the
living engine before the first command. Nothing of LMCache is replaced or patched.

LMCache's classes, versions 0.4.3 and 0.4.4: cache_engine.LMCacheEngine, storage_backend.storage_manager.StorageManager,
storage_backend.local_cpu_backend.LocalCPUBackend, storage_backend.local_disk_backend.LocalDiskBackend,
storage_backend.cache_policy, memory_management.TensorMemoryObj and MixedMemoryAllocator, utils.DiskCacheMetadata,
event_manager.EventManager, token_database.TokenDatabase, metadata.LMCacheMetadata.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

from kvbus.errors import EngineIncompatible

log = logging.getLogger(__name__)

TRIED_VERSIONS = ("0.4.3", "0.4.4")
"""Versions of LMCache that the integration tests have run on."""

CPU_TIER = "LocalCPUBackend"
DISK_TIER = "LocalDiskBackend"
LOCAL_TIERS = (CPU_TIER, DISK_TIER)

Key = Any
"""LMCache's CacheEngineKey, or LayerCacheEngineKey; hashable, used as it is."""


class Lock(Protocol):
    """A threading.Lock of LMCache's."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...
    def release(self) -> None: ...
    def locked(self) -> bool: ...
    def __enter__(self) -> bool: ...
    def __exit__(self, *error: object) -> None: ...


class MemoryMeta(Protocol):
    """memory_management.MemoryObjMetadata."""

    ref_count: int
    pin_count: int
    cached_positions: Any


class MemoryObject(Protocol):
    """memory_management.TensorMemoryObj: one allocation in the DDR pool.

    byte_array: of the physical size in 0.4.3, of the logical size in 0.4.4. meta: read without the object's lock.
    """

    meta: MemoryMeta

    @property
    def byte_array(self) -> memoryview: ...
    def get_physical_size(self) -> int: ...
    def ref_count_up(self) -> None: ...
    def ref_count_down(self) -> None: ...


class DiskEntry(Protocol):
    """utils.DiskCacheMetadata: one file. size: bytes in the file, rounded up to the pool's alignment."""

    path: str
    size: int
    shape: Any
    dtype: Any
    fmt: Any
    cached_positions: Any
    pin_count: int

    def pin(self) -> bool: ...
    def unpin(self) -> bool: ...


class CachePolicy(Protocol):
    """storage_backend.cache_policy.BaseCachePolicy: LRU, LFU, FIFO, MRU. Called under the backend's own lock."""

    def update_on_hit(self, key: Key, cache_dict: Any) -> None: ...
    def update_on_put(self, key: Key) -> None: ...
    def update_on_force_evict(self, key: Key) -> None: ...
    def get_evict_candidates(self, cache_dict: Any, num_candidates: int = 1) -> list[Key]: ...


class Backend(Protocol):
    """What the two local backends share. keys_in_request: looked up with pin, not yet touched."""

    cache_policy: CachePolicy
    keys_in_request: list[Key]

    def remove(self, key: Key, force: bool = True) -> bool: ...


class AddressManager(Protocol):
    """memory_management.AddressManager, or the paged allocator's."""

    def get_heap_size(self) -> int: ...
    def get_free_size(self) -> int: ...


class Pool(Protocol):
    """memory_management.TensorMemoryAllocator, or the paged one: the DDR pool itself."""

    num_active_allocations: int
    address_manager: AddressManager


class CpuBackend(Backend, Protocol):
    """storage_backend.local_cpu_backend.LocalCPUBackend: the DDR tier. cpu_lock guards hot_cache and the policy."""

    hot_cache: MutableMapping[Key, MemoryObject]
    use_hot: bool
    cpu_lock: Lock
    memory_allocator: Any

    def allocate(
        self, shapes: Any, dtypes: Any, fmt: Any = None, eviction: bool = True, busy_loop: bool = True
    ) -> MemoryObject | None: ...
    def batched_allocate(
        self, shapes: Any, dtypes: Any, batch_size: int, fmt: Any = None, eviction: bool = True, busy_loop: bool = True
    ) -> list[MemoryObject] | None: ...
    def batched_submit_put_task(self, keys: Sequence[Key], memory_objs: list[MemoryObject]) -> None: ...


class DiskWorker(Protocol):
    """storage_backend.local_disk_backend.LocalDiskWorker. put_tasks: keys whose file is being written."""

    put_lock: Lock
    put_tasks: list[Key]


class DiskBackend(Backend, Protocol):
    """storage_backend.local_disk_backend.LocalDiskBackend: the SSD tier. disk_lock guards dict, policy and sizes.

    current_cache_size: bytes that the backend believes to hold; its own remove() does not lower it.
    """

    dict: MutableMapping[Key, DiskEntry]
    disk_lock: Lock
    disk_worker: DiskWorker
    current_cache_size: float
    use_odirect: bool
    os_disk_bs: int


class EventManager(Protocol):
    """event_manager.EventManager: the asynchronous loads that requests wait for."""

    def get_events_count_by_status(self, event_type: Any, status: Any) -> int: ...


class StorageManager(Protocol):
    """storage_backend.storage_manager.StorageManager. loop: its asyncio loop, on a thread of its own."""

    storage_backends: Mapping[str, Any]
    loop: Any

    def is_frozen(self) -> bool: ...
    def is_backend_bypassed(self, backend_name: str) -> bool: ...
    def get_non_allocator_backends(self) -> list[str]: ...


class TokenDatabase(Protocol):
    """token_database.TokenDatabase: hashes tokens, builds keys."""

    hash_func: Callable[..., Any]

    def process_tokens(
        self,
        tokens: Any = None,
        hashes: Any = None,
        offsets: Any = None,
        mask: Any = None,
        make_key: bool = True,
        request_configs: Any = None,
    ) -> Iterable[tuple[int, int, Any]]: ...


class Metadata(Protocol):
    """metadata.LMCacheMetadata: which shard this engine holds."""

    model_name: str
    world_size: int
    worker_id: int

    def is_first_rank(self) -> bool: ...
    def get_num_groups(self) -> int: ...


class Config(Protocol):
    """config.LMCacheEngineConfig."""

    chunk_size: int
    pre_caching_hash_algorithm: str


class CacheEngine(Protocol):
    """cache_engine.LMCacheEngine. lookup_pins: lookup id -> backend name -> keys pinned for it."""

    config: Config
    metadata: Metadata
    token_database: TokenDatabase
    storage_manager: StorageManager | None
    event_manager: EventManager
    lookup_pins: Mapping[str, Mapping[str, Sequence[Any]]]
    save_only_first_rank: bool
    use_layerwise: bool
    async_loading: bool
    num_layers: int


def lmcache_version() -> str:
    """The installed LMCache's version, or `unknown`."""
    try:
        return version("lmcache")
    except PackageNotFoundError:
        return "unknown"


def stores_nothing(engine: CacheEngine) -> bool:
    """True on a rank that leaves storing to the first one (MLA with save_only_first_rank)."""
    return engine.save_only_first_rank and not engine.metadata.is_first_rank()


def pool_of(cpu: CpuBackend) -> Pool:
    """The DDR pool behind the backend's allocator: MixedMemoryAllocator has it as pin_allocator, the paged one of
    peer-to-peer mode as cpu_allocator."""
    allocator = cpu.memory_allocator
    pool: Pool = getattr(allocator, "pin_allocator", None) or getattr(allocator, "cpu_allocator", allocator)
    return pool


def verify(engine: Any) -> None:
    """Compare what this module lists with a living engine, after its post_init().

    Raises EngineIncompatible naming every attribute, method and parameter that is not as expected.
    """
    misfits: list[str] = []
    _compare(engine, CacheEngine, misfits)
    if not misfits:
        _compare(engine.config, Config, misfits)
        _compare(engine.metadata, Metadata, misfits)
        _compare(engine.token_database, TokenDatabase, misfits)
        _compare(engine.event_manager, EventManager, misfits)
    if not misfits and not stores_nothing(engine):
        _verify_storage(engine, misfits)
    found = lmcache_version()
    if misfits:
        raise EngineIncompatible(
            f"LMCache {found} does not have what kvbus uses of it: " + "; ".join(misfits),
            hint=f"Install a version of LMCache that kvbus has been tried with: {', '.join(TRIED_VERSIONS)}.",
        )
    if found.split("+")[0] not in TRIED_VERSIONS:
        log.warning(
            "LMCache %s has all that kvbus uses, but kvbus has been tried with %s only",
            found,
            ", ".join(TRIED_VERSIONS),
        )


def _verify_storage(engine: CacheEngine, misfits: list[str]) -> None:
    manager = engine.storage_manager
    if manager is None:
        misfits.append("LMCacheEngine.storage_manager is None: post_init() has not run")
        return
    _compare(manager, StorageManager, misfits)
    backends = getattr(manager, "storage_backends", {})
    cpu, disk = backends.get(CPU_TIER), backends.get(DISK_TIER)
    if cpu is None:
        misfits.append(f"there is no {CPU_TIER} (max_local_cpu_size is 0?)")
    else:
        _compare(cpu, CpuBackend, misfits)
        _compare_parts(cpu, {"cpu_lock": Lock, "cache_policy": CachePolicy}, misfits)
        if hasattr(cpu, "memory_allocator"):
            _compare(pool_of(cpu), Pool, misfits)
            _compare_parts(pool_of(cpu), {"address_manager": AddressManager}, misfits)
    if disk is not None:
        _compare(disk, DiskBackend, misfits)
        _compare_parts(disk, {"disk_lock": Lock, "cache_policy": CachePolicy, "disk_worker": DiskWorker}, misfits)
    _verify_classes(misfits)


def _verify_classes(misfits: list[str]) -> None:
    """The two kinds of objects of which there may be none yet, by their classes."""
    from lmcache.utils import DiskCacheMetadata
    from lmcache.v1.event_manager import EventStatus, EventType
    from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj

    with_fields: list[tuple[Any, type]] = [(DiskCacheMetadata, DiskEntry), (MemoryObjMetadata, MemoryMeta)]
    for cls, protocol in with_fields:
        fields = getattr(cls, "__dataclass_fields__", {})
        misfits += [f"{cls.__name__}.{name} is missing" for name in _attributes(protocol) if name not in fields]
    with_methods: list[tuple[Any, type]] = [(DiskCacheMetadata, DiskEntry), (TensorMemoryObj, MemoryObject)]
    for cls, protocol in with_methods:
        for name, listed in _methods(protocol):
            _compare_method(cls.__name__, getattr(cls, name, None), name, listed, misfits)
    if not hasattr(EventType, "LOADING") or not {"ONGOING", "DONE"} <= set(EventStatus.__members__):
        misfits.append("EventType.LOADING or EventStatus.ONGOING, DONE is missing")


def _compare(thing: Any, protocol: type, misfits: list[str]) -> None:
    name = type(thing).__name__
    misfits += [f"{name}.{listed} is missing" for listed in _attributes(protocol) if not hasattr(thing, listed)]
    for method, listed in _methods(protocol):
        _compare_method(name, getattr(thing, method, None), method, listed, misfits)


def _compare_parts(thing: Any, parts: dict[str, type], misfits: list[str]) -> None:
    for name, protocol in parts.items():
        if hasattr(thing, name):
            _compare(getattr(thing, name), protocol, misfits)


def _compare_method(owner: str, found: Any, name: str, listed: Any, misfits: list[str]) -> None:
    if found is None:
        misfits.append(f"{owner}.{name} is missing")
        return
    if isinstance(listed, property):
        return
    if not callable(found):
        misfits.append(f"{owner}.{name} is not a method")
        return
    try:
        parameters = inspect.signature(found).parameters
    except ValueError:  # builtins such as threading.Lock.acquire have no signature to compare
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    wanted = set(inspect.signature(listed).parameters) - {"self"} - set(parameters)
    misfits += [f"{owner}.{name}() has no parameter {parameter}" for parameter in sorted(wanted)]


def _attributes(protocol: type) -> list[str]:
    return [name for cls in _protocols(protocol) for name in inspect.get_annotations(cls)]


def _methods(protocol: type) -> list[tuple[str, Any]]:
    return [
        (name, member)
        for cls in _protocols(protocol)
        for name, member in cls.__dict__.items()
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property))
    ]


def _protocols(protocol: type) -> list[type]:
    return [cls for cls in protocol.__mro__ if cls.__module__ == __name__]
