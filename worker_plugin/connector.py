"""The class that vLLM loads, in both roles: LMCache's own connector plus the bus.

    --kv-transfer-config '{"kv_connector": "KVBusConnector", "kv_role": "kv_both",
                           "kv_connector_module_path": "worker_plugin.connector"}'

It extends LMCache-Ascend's dynamic connector where `lmcache_ascend` is installed, LMCache's own elsewhere, and is that
connector in everything that is not ours: arguments and results pass through untouched. A fault of ours is counted and
logged, and the request goes on.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import re
from typing import Any

from kvbus.metrics import Counters, RateLimitedLog
from kvbus.protocol.hashes import format_hash, parse_hash
from kvbus.settings import Settings, default_instance, load_settings


def _base_connector() -> Any:
    """The connector to extend. Installed but broken must be loud: without it an NPU would run on CUDA's code."""
    if importlib.util.find_spec("lmcache_ascend") is not None:
        # Before any lmcache module: it replaces names in them, and a name bound earlier would stay the old one.
        import lmcache_ascend  # noqa: F401
        from lmcache_ascend.integration.vllm.lmcache_ascend_connector_v1 import LMCacheAscendConnectorV1Dynamic

        return LMCacheAscendConnectorV1Dynamic
    from lmcache.integration.vllm.lmcache_connector_v1 import LMCacheConnectorV1Dynamic

    return LMCacheConnectorV1Dynamic


_Base: Any = _base_connector()

# Only now may anything come in that imports lmcache.
import vllm  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: E402
from vllm.v1.request import RequestStatus  # noqa: E402

import worker_plugin  # noqa: E402
from publisher import FinishedRequest, Publisher  # noqa: E402
from publisher.hook import finished_request  # noqa: E402
from worker_plugin.connector_hashes import HashTap, use_blake3  # noqa: E402

log = logging.getLogger(__name__)

MAX_INSTANCE = 120
"""Characters of a name taken from LMCache; a rank can follow."""


class KVBusConnector(_Base):  # type: ignore[misc]
    """LMCache's connector with the bus: events out of the scheduler, commands into every worker."""

    # vLLM's factory reads the signature to know what to pass.
    @functools.wraps(_Base.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self._vllm_config
        settings = load_settings(config.kv_transfer_config.kv_connector_extra_config or {}, prefix="kvbus.")
        instance = instance_name(settings, self._lmcache_engine.config, config)
        self._kvbus_scheduler: SchedulerSide | None = None
        self._kvbus_worker: WorkerSide | None = None
        if self.role == KVConnectorRole.SCHEDULER:
            self._kvbus_scheduler = SchedulerSide(self._lmcache_engine, settings, instance, config.model_config.model)
        else:
            self._kvbus_worker = WorkerSide(self._lmcache_engine, settings, instance)

    # worker role

    @functools.wraps(_Base.register_kv_caches)
    def register_kv_caches(self, *args: Any, **kwargs: Any) -> Any:
        result = super().register_kv_caches(*args, **kwargs)
        if self._kvbus_worker is not None:
            self._kvbus_worker.start()
        return result

    @functools.wraps(_Base.get_finished)
    def get_finished(self, finished_req_ids: set[str], *args: Any, **kwargs: Any) -> Any:
        result = super().get_finished(finished_req_ids, *args, **kwargs)
        if self._kvbus_worker is not None:
            self._kvbus_worker.unpin(finished_req_ids)
        return result

    # scheduler role

    @functools.wraps(_Base.get_num_new_matched_tokens)
    def get_num_new_matched_tokens(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        side = self._kvbus_scheduler
        if side is None:
            return super().get_num_new_matched_tokens(request, *args, **kwargs)
        side.listen_for(request)
        try:
            return super().get_num_new_matched_tokens(request, *args, **kwargs)
        finally:
            side.tap.request_id = None

    @functools.wraps(_Base.request_finished)
    def request_finished(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        return self._kvbus_finish(super().request_finished, request, args, kwargs)

    if hasattr(_Base, "request_finished_all_groups"):  # what vLLM calls instead where the base supports hybrid models

        @functools.wraps(_Base.request_finished_all_groups)
        def request_finished_all_groups(self, request: Any, *args: Any, **kwargs: Any) -> Any:
            return self._kvbus_finish(super().request_finished_all_groups, request, args, kwargs)

    def _kvbus_finish(self, base: Any, request: Any, args: Any, kwargs: Any) -> Any:
        side = self._kvbus_scheduler
        if side is None:
            return base(request, *args, **kwargs)
        cancelled = side.is_cancelled(request)
        try:
            delay_free, params = base(request, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - LMCache 0.4.3 raises here on an abort with asynchronous loading
            # and a wrapped lookup client, LMCache-Ascend with chunk hashes and the synchronous client; the whole
            # engine would die of it.
            side.trouble("base", "%s.request_finished raised %r; the request ends without it", _Base.__name__, error)
            side.cancel(request)
            delay_free, params = False, None
        return delay_free, side.finished(request, params, cancelled)

    # both roles

    @functools.wraps(_Base.shutdown)
    def shutdown(self, *args: Any, **kwargs: Any) -> Any:
        for side in (self._kvbus_worker, self._kvbus_scheduler):
            if side is not None:
                side.stop()
        return super().shutdown(*args, **kwargs)


class SchedulerSide:
    """Hashes from each request's own lookup, and an event for each request that ends. All on the scheduler thread."""

    def __init__(self, impl: Any, settings: Settings, instance: str, model: str) -> None:
        self.tap = HashTap(use_blake3=settings.hash_algorithm == "blake3")
        self.counters = Counters()
        self._log = RateLimitedLog(log)
        self._impl = impl
        self._settings = settings
        self._instance = instance
        self._model = model
        self._chunk_size: int = impl.config.chunk_size
        self._skip_last: int = getattr(impl, "skip_last_n_tokens", 0)
        self._fingerprint = ""
        try:
            self.tap.follow(impl.lookup_client)
            self._fingerprint = self.tap.fingerprint(self._chunk_size, impl.config.pre_caching_hash_algorithm)
        except Exception as error:  # noqa: BLE001 - never harm the engine that we are a guest in
            self.trouble("hash_tap", "cannot listen to LMCache's lookups: %r; hashes will be made a second time", error)
        if not self._fingerprint:
            self.trouble("hash_tap", "LMCache's lookup client makes no chunk hashes: events will carry none")
        self._publisher: Publisher | None = None
        if settings.publish:
            self._publisher = Publisher(
                settings,
                name=f"{instance}/scheduler",
                instance=instance,
                model=model,
                hash_fingerprint=self._fingerprint,
            )
            self.counters = _joined(self.counters, self._publisher.counters)  # shown with the publisher's own
            self._publisher.start()

    def trouble(self, kind: str, message: str, *args: object) -> None:
        """Count and log a fault that was kept from the request."""
        self.counters.add(f"connector_{kind}_faults")
        self._log.warning(kind, message, *args)

    def listen_for(self, request: Any) -> None:
        """From here until the tap's request_id is cleared, hashes that LMCache makes are this request's."""
        try:
            self._client()
            self.tap.request_id = request.request_id
        except Exception as error:  # noqa: BLE001 - never harm the request
            self.trouble("hash_tap", "cannot listen to LMCache's lookup: %r; its hashes will be made again", error)

    def is_cancelled(self, request: Any) -> bool:
        """Whether LMCache itself gave this request's asynchronous lookup up before the request ended (a timeout)."""
        try:
            return request.request_id in getattr(self._client(), "aborted_lookups", ())
        except Exception as error:  # noqa: BLE001 - never harm the request
            self.trouble("forget", "cannot see LMCache's aborted lookups: %r", error)
            return True

    def cancel(self, request: Any) -> None:
        """What LMCache's request_finished does for an aborted request, on the client that knows how."""
        try:
            client = self._client()
            if hasattr(client, "cancel_lookup") and request.status == RequestStatus.FINISHED_ABORTED:
                client.cancel_lookup(request.request_id)
        except Exception as error:  # noqa: BLE001 - never harm the request
            self.trouble("forget", "cannot cancel the lookup of request %.80s: %r", request.request_id, error)

    def finished(self, request: Any, params: Any, cancelled: bool) -> Any:
        """Publish the request's event, and return its kv_transfer_params with the hashes in them. Never raises."""
        hashes = self.tap.pop(request.request_id)
        try:
            self._forget(request.request_id, cancelled)
        except Exception as error:  # noqa: BLE001 - never harm the request
            self.trouble("forget", "cannot clear what LMCache keeps of request %.80s: %r", request.request_id, error)
        try:
            if self._publisher is not None:
                self._publisher.publish(self._event(request, params, hashes))
        except Exception as error:  # noqa: BLE001 - never harm the request
            self.trouble("publish", "cannot publish the end of request %.80s: %r", request.request_id, error)
        try:
            wanted = hashes is not None and self._settings.return_chunk_hashes
            if wanted and (not params or params.get("chunk_hashes") is None):
                params = {**(params or {}), "chunk_hashes": [format_hash(found) for found in hashes or ()]}
        except Exception as error:  # noqa: BLE001 - never harm the request
            self.trouble("response", "no hashes in the response to request %.80s: %r", request.request_id, error)
        return params

    def stop(self) -> None:
        """Send what is buffered, within stop_ms; then the publisher's thread has ended. Never raises."""
        try:
            if self._publisher is not None:
                self._publisher.close(self._settings.stop_ms / 1000)
        except Exception as error:  # noqa: BLE001 - the base class has to be shut down, too
            self.trouble("stop", "the publisher did not stop in good order: %r", error)

    def _client(self) -> Any:
        """LMCache's innermost lookup client, listened to."""
        return self.tap.follow(self._impl.lookup_client)

    def _forget(self, request_id: str, cancelled: bool) -> None:
        """Clear what LMCache 0.4.3 keeps for ever of a request that is aborted after its lookup."""
        impl = self._impl
        impl.load_specs.pop(request_id, None)
        impl._requests_priority.pop(request_id, None)
        client = self._client()
        aborted = getattr(client, "aborted_lookups", None)
        if aborted is None:
            client.clear_lookup_status(request_id)
        elif not cancelled and request_id not in client.reqs_status:
            # Cancelled just now, with no lookup under way that LMCache would clear it after.
            aborted.discard(request_id)

    def _event(self, request: Any, params: Any, hashes: Any) -> FinishedRequest:
        later = None
        theirs = params.get("chunk_hashes") if params else None
        if theirs is not None:  # LMCache-Ascend with enable_chunk_hashes_return
            hashes, later = None, functools.partial(_parse_all, theirs)
        elif hashes is None:
            later = self._hash_again(request)
        given = request.kv_transfer_params if isinstance(request.kv_transfer_params, dict) else None
        return finished_request(
            request_id=request.request_id,
            instance=self._instance,
            model=self._model,
            status=request.status.name,
            chunk_hashes=hashes,
            hashes_later=later,
            chunk_size=self._chunk_size,
            prompt_tokens=request.num_prompt_tokens,
            output_tokens=request.num_output_tokens,
            cached_tokens=request.num_cached_tokens,
            hash_fingerprint=self._fingerprint,
            request_configs=given,  # where LMCache's extract_request_configs finds the tags
            kv_transfer_params=given,
        )

    def _hash_again(self, request: Any) -> Any:
        """Hashes for a request that LMCache never looked up, made as its lookup would have made them."""
        from lmcache.integration.vllm.utils import apply_mm_hashes_to_token_ids, extract_mm_features

        tokens = request.prompt_token_ids or ()  # None: the prompt came as embeddings
        seen, places = extract_mm_features(request)
        skip_last = self._skip_last

        def prepare(tokens: Any) -> Any:
            import torch

            if seen and places:
                tokens = apply_mm_hashes_to_token_ids(torch.tensor(tokens), seen, places).tolist()
            return list(tokens[:-skip_last] if skip_last else tokens)

        return self.tap.later(tokens, prepare)


class WorkerSide:
    """The commands' way into one rank's engine."""

    def __init__(self, impl: Any, settings: Settings, instance: str) -> None:
        self.counters = Counters()
        self._log = RateLimitedLog(log)
        self._impl = impl
        self._settings = settings
        self._instance = instance
        self._worker: Any = None
        if settings.hash_algorithm == "blake3" and impl.lmcache_engine is not None:
            use_blake3(impl.lmcache_engine.token_database)

    def start(self) -> None:
        """Start consuming; the engine has to be ready (LMCache's post_init has run). Never raises."""
        engine = self._impl.lmcache_engine
        if not self._settings.consume or self._worker is not None or engine is None:
            return
        try:
            rank = self._impl.lmcache_engine_metadata.worker_id
            self._worker = worker_plugin.attach(
                engine, settings=self._settings, instance=self._instance, rank=rank, vllm_version=vllm.__version__
            )
            self.counters = _joined(self.counters, self._worker.counters)  # shown with the worker's own
        except Exception:  # the model serves without the bus, and the issuers of commands miss this rank
            self.counters.add("connector_attach_faults")
            log.exception("this worker takes no commands from the bus")

    def unpin(self, request_ids: set[str]) -> None:
        """Release what LMCache 0.4.3 leaves pinned of a request that was looked up and then aborted. Never raises."""
        engine = self._impl.lmcache_engine
        if engine is None:
            return
        for request_id in request_ids:
            try:
                engine.lookup_unpin(request_id)
            except Exception as error:  # noqa: BLE001 - never harm the engine's step
                self.counters.add("connector_unpin_faults")
                self._log.warning("unpin", "cannot unpin the chunks of request %.80s: %r", request_id, error)

    def stop(self) -> None:
        """Stop consuming, within stop_ms. Never raises."""
        worker, self._worker = self._worker, None
        try:
            if worker is not None:
                worker.stop(self._settings.stop_ms / 1000)
        except Exception as error:  # noqa: BLE001 - the base class has to be shut down, too
            self._log.warning("stop", "the worker did not stop in good order: %r", error)


def instance_name(settings: Settings, lmcache_config: Any, vllm_config: Any) -> str:
    """This model server's name: the setting, else LMCache's instance id if someone set it, else the host's name.

    With data parallelism "-dp<rank>" follows, as each rank is a scheduler of its own.
    """
    name = settings.instance
    if name is None:
        given = getattr(lmcache_config, "lmcache_instance_id", None) or ""
        # LMCache 0.4.3, config_base._post_init: a fresh UUID in every process if nobody set one.
        is_set = given and not re.fullmatch(r"lmcacheengineconfig_[0-9a-f]{32}", given)
        name = re.sub(r"[^A-Za-z0-9._-]", "-", given)[:MAX_INSTANCE] if is_set else default_instance()
    parallel = vllm_config.parallel_config
    index = getattr(parallel, "data_parallel_index", None) or parallel.data_parallel_rank
    # vLLM 0.18, v1.engine.core: a dense model's ranks are told a size of 1, but their engine ids end in _dp<rank>.
    suffixed = re.search(r"_dp[0-9]+$", vllm_config.kv_transfer_config.engine_id or "")
    return f"{name}-dp{index}" if parallel.data_parallel_size > 1 or index or suffixed else name


def _joined(own: Counters, shown: Counters) -> Counters:
    """`shown`, with what was counted before there was such a place."""
    for name, value in own.snapshot().items():
        shown.set(name, value)
    return shown


def _parse_all(texts: Any) -> tuple[Any, ...]:
    return tuple(map(parse_hash, texts))
