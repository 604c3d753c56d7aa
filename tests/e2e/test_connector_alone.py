"""The connector's parts beside real vLLM and LMCache classes, without an engine: what a run on the CPU cannot show."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.e2e.engine import ROOT, common_environment

# The tests' scripts run outside pytest, as vLLM and LMCache keep state per process and warn at import; where nothing
# forbids it in one process, as importing both takes long.

LOOP = """
import json, sys, traceback
for line in sys.stdin:
    try:
        exec(json.loads(line), {"__name__": "script"})
    except BaseException:
        print("FAILED", json.dumps(traceback.format_exc()), flush=True)
"""

COMMON = """
import json, sys
from types import SimpleNamespace as Namespace

def show(**found):
    print("FOUND", json.dumps(found, default=str), flush=True)

class Client:
    def __init__(self, database):
        self.token_database = database
    def lookup(self, tokens):
        return [found for _, _, found in self.token_database.process_tokens(tokens, make_key=False)]
    def clear_lookup_status(self, lookup_id):
        pass

def database(**more):
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.token_database import ChunkedTokenDatabase
    return ChunkedTokenDatabase(LMCacheEngineConfig.from_defaults(chunk_size=16, **more), None)

def request(request_id="chatcmpl-1-0123abcd", tokens=range(40), status="FINISHED_STOPPED", params=None):
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request, RequestStatus
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params} if params else None)
    made = Request(request_id, list(tokens), sampling, None)
    made.status = RequestStatus[status]
    return made

class Publisher:
    events = []
    def __init__(self, settings, **names):
        from kvbus.metrics import Counters
        self.counters = Counters()
    def start(self):
        pass
    def publish(self, finished):
        self.events.append(finished)
        return True
    def close(self, timeout_s):
        return True

def side(client, **settings):
    from kvbus.settings import Settings
    from worker_plugin import connector
    connector.Publisher = Publisher
    config = Namespace(chunk_size=16, pre_caching_hash_algorithm="builtin")
    impl = Namespace(config=config, lookup_client=client, load_specs={}, _requests_priority={})
    return connector.SchedulerSide(impl, Settings(**settings), "unit", "model")
"""


Run = Callable[[str], Any]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a script with what COMMON defines and returns what it shows."""
    process = start(LOOP)
    assert process.stdin is not None
    assert process.stdout is not None

    def run(script: str) -> Any:
        process.stdin.write(json.dumps(COMMON + script) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            if line.startswith("FOUND "):
                return SimpleNamespace(**json.loads(line.removeprefix("FOUND ")))
            if line.startswith("FAILED "):
                pytest.fail(json.loads(line.removeprefix("FAILED ")))
        pytest.fail("the process has ended")

    yield run
    process.stdin.close()
    process.wait(30)
    process.stdout.close()


def start(script: str, *, path: Path = ROOT, **env: str) -> subprocess.Popen[str]:
    environment = common_environment() | {"LMCACHE_TRACK_USAGE": "false", "PATH": "/usr/bin:/bin", **env}
    environment["PYTHONPATH"] = f"{path}:{ROOT}"
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True
    )


def run_alone(script: str, *, path: Path, **env: str) -> tuple[int, str]:
    """Exit code and output of a script in a process of its own, with `path` to import from."""
    process = start(COMMON + script, path=path, **env)
    output, _ = process.communicate(timeout=200)
    return process.returncode, output


def test_hashes_of_the_lookup_through_wrappers_and_only_while_armed(run: Run) -> None:
    found = run(
        """
from worker_plugin.connector_hashes import HashTap
tap = HashTap()
inner = Client(database())
outer = Namespace(actual_lookup_client=Namespace(actual_lookup_client=inner))
tap.follow(outer)
quiet = inner.lookup(list(range(40)))
after_quiet = dict(tap.hashes)
tap.request_id = "r"
first = inner.lookup(list(range(40)))
second = inner.lookup(list(range(70)))
tap.request_id = "short"
inner.lookup([1, 2, 3])
tap.request_id = "torn"
next(iter(inner.token_database.process_tokens(list(range(40)), make_key=False)))
tap.request_id = None
same = tap.follow(outer) is inner
inner.token_database.hash_func = hash  # passes through to the real one
show(quiet=quiet, after_quiet=after_quiet, first=first, second=second, kept=tap.pop("r"), again=tap.pop("r"),
     short=tap.pop("short"), torn=tap.pop("torn"), left=len(tap.hashes), same=same,
     chunk_size=inner.token_database.chunk_size)
"""
    )
    assert found.quiet == found.first == found.second[:2]
    assert found.after_quiet == {}
    assert found.kept == found.second  # the latest lookup, which covers more
    assert found.again is None
    assert found.short == []  # looked up, no whole chunk
    assert found.torn is None  # a lookup that did not come to its end says nothing
    assert (found.left, found.same, found.chunk_size) == (0, True, 16)


def test_a_recreated_client_is_followed_and_hashes_the_same_way(run: Run) -> None:
    found = run(
        """
from kvbus.protocol import blake3_chain
first, second = Client(database()), Client(database())
scheduler = side(first, hash_algorithm="blake3")
made = request()
scheduler.listen_for(made)
one = first.lookup(list(range(40)))
scheduler._impl.lookup_client = second
scheduler.listen_for(made)
two = second.lookup(list(range(40)))
show(one=one, two=two, chain=blake3_chain(list(range(40)), 16), fingerprint=scheduler._fingerprint)
"""
    )
    assert found.one == found.two == found.chain
    assert found.fingerprint.startswith("blake3/16/")


def test_blake3_takes_both_forms_of_a_chunk_and_odd_tokens(run: Run) -> None:
    found = run(
        """
from worker_plugin.connector_hashes import _blake3_hash
from lmcache.v1 import token_database
from kvbus.protocol import blake3_chain
database()
none = token_database.NONE_HASH
chain = blake3_chain(list(range(32)), 16)
first = _blake3_hash((none, tuple(range(16)), ()))
show(chain=chain, lmcache=[first, _blake3_hash((first, tuple(range(16, 32)), ()))],
     ascend=[_blake3_hash((none, tuple(range(16)))), _blake3_hash((first, tuple(range(16, 32))))],
     negative=_blake3_hash((none, (-5, 1))), wrapped=blake3_chain([2**32 - 5, 1], 2)[0],
     extra=_blake3_hash((none, tuple(range(16)), ("image-7",))))
"""
    )
    assert found.lmcache == found.ascend == found.chain
    assert found.negative == found.wrapped
    assert found.extra != found.chain[0]


def test_a_request_never_looked_up_is_hashed_by_the_publisher_thread(run: Run) -> None:
    found = run(
        """
client = Client(database())
scheduler = side(client)
params = scheduler.finished(request(status="FINISHED_ABORTED"), None, False)
event = Publisher.events[-1]
show(params=params, now=event.chunk_hashes, later=event.hashes_later(), looked_up=client.lookup(list(range(40))),
     reason=event.reason, external=event.external_id, cached=event.cached_tokens)
"""
    )
    assert found.now is None
    assert found.later == found.looked_up != []
    assert found.params is None
    assert (found.reason, found.external, found.cached) == ("abort", "chatcmpl-1", 0)


def test_hashes_that_the_base_class_returns_are_used(run: Run) -> None:
    """As LMCache-Ascend does with enable_chunk_hashes_return."""
    found = run(
        """
scheduler = side(Client(database()))
theirs = {"chunk_hashes": ["-1f", "2a"], "first_tok": 5}
params = scheduler.finished(request(), theirs, False)
event = Publisher.events[-1]
show(params=params, untouched=params is theirs, later=event.hashes_later())
"""
    )
    assert found.params == {"chunk_hashes": ["-1f", "2a"], "first_tok": 5}
    assert found.untouched
    assert found.later == [-0x1F, 0x2A]


def test_hashes_join_what_the_base_class_returns_and_can_be_switched_off(run: Run) -> None:
    found = run(
        """
shown = []
for wanted in (True, False):
    client = Client(database())
    scheduler = side(client, return_chunk_hashes=wanted)
    made = request()
    scheduler.listen_for(made)
    client.lookup(list(range(40)))
    shown.append(scheduler.finished(made, {"first_tok": 5}, False))
show(on=shown[0], off=shown[1], events=[len(event.chunk_hashes) for event in Publisher.events])
"""
    )
    assert len(found.on["chunk_hashes"]) == 2
    assert found.on["first_tok"] == 5
    assert found.off == {"first_tok": 5}
    assert found.events == [2, 2]


def test_our_own_faults_are_counted_and_cost_the_request_nothing(run: Run) -> None:
    found = run(
        """
class Broken:
    def __getattr__(self, name):
        raise RuntimeError("broken " + name)
scheduler = side(Broken())
made = request()
scheduler.listen_for(made)
cancelled = scheduler.is_cancelled(made)
scheduler.cancel(made)
def refuse(finished):
    raise RuntimeError("broken publisher")
Publisher.publish = staticmethod(refuse)
scheduler.tap.hashes[made.request_id] = (1, 2)
params = scheduler.finished(made, {"a": 1}, cancelled)
scheduler.stop()
show(params=params, counters=scheduler.counters.snapshot())
"""
    )
    assert found.params == {"a": 1, "chunk_hashes": ["1", "2"]}
    assert found.counters["connector_publish_faults"] == 1
    assert found.counters["connector_hash_tap_faults"] >= 1
    assert found.counters["connector_forget_faults"] >= 1


def test_instance_names(run: Run) -> None:
    found = run(
        """
from kvbus.settings import Settings, default_instance
from worker_plugin.connector import instance_name
def name(setting=None, lmcache=None, size=1, index=0, engine="e"):
    parallel = Namespace(data_parallel_size=size, data_parallel_index=index, data_parallel_rank=index)
    config = Namespace(parallel_config=parallel, kv_transfer_config=Namespace(engine_id=engine))
    return instance_name(Settings(instance=setting), Namespace(lmcache_instance_id=lmcache), config)
uuid = "lmcacheengineconfig_" + "0f" * 16
show(host=default_instance(), nothing=name(lmcache=uuid), set=name(lmcache="my instance"), setting=name("a", "b"),
     dp=name("a", size=2, index=1), dense=name("a", engine="123_dp0"), long=len(name(lmcache="x" * 500)))
"""
    )
    assert found.nothing == found.host
    assert (found.set, found.setting) == ("my-instance", "a")
    assert (found.dp, found.dense) == ("a-dp1", "a-dp0")
    assert found.long == 120


STAND_IN = """
from lmcache.integration.vllm.lmcache_connector_v1 import LMCacheConnectorV1Dynamic
from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA

class LMCacheAscendConnectorV1Dynamic(LMCacheConnectorV1Dynamic, SupportsHMA):
    def __init__(self, vllm_config, role):
        pass
    def request_finished_all_groups(self, request, block_ids):
        return True, {"groups": len(block_ids)}
"""


def test_lmcache_ascend_is_extended_where_it_is_installed(tmp_path: Path) -> None:
    """A stand-in with its name and place: the real one needs an NPU."""
    package = tmp_path / "lmcache_ascend" / "integration" / "vllm"
    package.mkdir(parents=True)
    loaded = "import sys\nEARLY = not any(name.split('.')[0] == 'lmcache' for name in sys.modules)\n"
    (tmp_path / "lmcache_ascend" / "__init__.py").write_text(loaded)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "lmcache_ascend_connector_v1.py").write_text(STAND_IN)
    code, output = run_alone(
        """
from worker_plugin.connector import KVBusConnector
import inspect, lmcache_ascend
from vllm.distributed.kv_transfer.kv_connector.v1 import supports_hma
from vllm.utils.func_utils import supports_kw
connector = object.__new__(KVBusConnector)
connector._kvbus_scheduler = side(Client(database()))
answer = connector.request_finished_all_groups(request(), ([1], [2]))
show(base=KVBusConnector.__mro__[1].__name__, early=lmcache_ascend.EARLY, hma=supports_hma(KVBusConnector),
     kw=supports_kw(KVBusConnector, "kv_cache_config"), answer=answer, events=len(Publisher.events))
""",
        path=tmp_path,
        VLLM_PLUGINS="",  # not the CPU's stand-in, which imports lmcache before any connector
    )
    assert code == 0, output[-3_000:]
    found = SimpleNamespace(**json.loads(output.rpartition("FOUND ")[2].splitlines()[0]))
    assert found.base == "LMCacheAscendConnectorV1Dynamic"
    assert found.early  # before any lmcache module
    assert found.hma
    assert not found.kw  # vLLM reads the signature of the base
    assert found.answer == [True, {"groups": 2}]
    assert found.events == 1


def test_a_broken_lmcache_ascend_is_loud(tmp_path: Path) -> None:
    (tmp_path / "lmcache_ascend").mkdir()
    (tmp_path / "lmcache_ascend" / "__init__.py").write_text("import torch_npu_that_is_not_here\n")
    code, output = run_alone("import worker_plugin.connector", path=tmp_path)
    assert code != 0
    assert "torch_npu_that_is_not_here" in output


def test_lmcache_itself_is_extended_elsewhere_with_its_own_signature(run: Run) -> None:
    found = run(
        """
from worker_plugin.connector import KVBusConnector
from vllm.utils.func_utils import supports_kw
import inspect
base = KVBusConnector.__mro__[1]
names = [name for name in vars(KVBusConnector) if not name.startswith("_")]
show(base=base.__name__, kw=supports_kw(KVBusConnector, "kv_cache_config"),
     same=[inspect.signature(getattr(KVBusConnector, name)) == inspect.signature(getattr(base, name))
           for name in [*names, "__init__"]])
"""
    )
    assert found.base == "LMCacheConnectorV1Dynamic"
    assert found.kw
    assert all(found.same)
