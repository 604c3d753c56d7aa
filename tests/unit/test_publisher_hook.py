"""What is published of a request that vLLM has finished."""

from __future__ import annotations

import pytest

from kvbus.protocol import FinishReason
from publisher.hook import external_id, finish_reason, finished_request, tags_of


@pytest.mark.parametrize(
    ("internal", "external"),
    [
        ("chatcmpl-abc-0123abcd", "chatcmpl-abc"),
        ("0_chatcmpl-abc-0123abcd", "chatcmpl-abc"),
        ("12_cmpl-abc-0-0123abcd", "cmpl-abc-0"),
        ("7_mine-0123abcd", "7_mine"),  # the caller's own id may begin like that
        ("chatcmpl-abc", None),
        ("chatcmpl-abc-0123ABCD", None),
        ("-0123abcd", None),
        ("two\nlines-0123abcd", "two\nlines"),
        ("", None),
    ],
)
def test_external_id(internal: str, external: str | None) -> None:
    assert external_id(internal) == external


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ("FINISHED_STOPPED", "stop"),
        ("RequestStatus.FINISHED_LENGTH_CAPPED", "length"),
        ("FINISHED_ABORTED", "abort"),
        ("FINISHED_IGNORED", "length"),
        ("FINISHED_ERROR", "error"),
        ("FINISHED_REPETITION", "repetition"),
        ("FINISHED_BY_MAGIC", "error"),
        ("", "error"),
    ],
)
def test_reason(status: str, reason: str) -> None:
    assert finish_reason(status) == reason
    assert finish_reason(status) in set(FinishReason)


def test_tags_keep_their_order() -> None:
    configs = {"lmcache.tag.b": "2", "other": 1, "lmcache.tag.a": 1}
    assert tags_of(configs) == (("b", "2"), ("a", "1"))
    assert tags_of(None) == ()


def test_finished_request() -> None:
    finished = finished_request(
        request_id="chatcmpl-x-00000000",
        instance="i",
        model="m",
        status="FINISHED_STOPPED",
        chunk_hashes=[1, -2],
        chunk_size=256,
        prompt_tokens=600,
        output_tokens=3,
        cached_tokens=-1,
        hash_fingerprint="builtin/256/1",
        kv_transfer_params={"kvbus": {"session": "s"}, "else": 1},
    )
    assert finished.external_id == "chatcmpl-x"
    assert finished.chunk_hashes == (1, -2)
    assert finished.cached_tokens == 0
    assert finished.context == {"session": "s"}


@pytest.mark.parametrize("params", [None, {}, {"kvbus": None}, {"kvbus": "text"}, {"kvbus": [1]}])
def test_a_context_that_is_no_map_is_none(params: dict[str, object] | None) -> None:
    finished = finished_request(
        request_id="r",
        instance="i",
        model="",
        status="FINISHED_ABORTED",
        chunk_hashes=None,
        chunk_size=0,
        prompt_tokens=0,
        output_tokens=0,
        cached_tokens=0,
        hash_fingerprint="",
        kv_transfer_params=params,
    )
    assert finished.context == {}
    assert finished.chunk_hashes is None
