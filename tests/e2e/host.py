"""The process that holds a real vLLM engine for a test, and does what the test asks over a socket.

python -m tests.e2e.host <socket> <JSON: arguments of vllm.LLM>
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from multiprocessing.connection import Client
from typing import Any

AUTHKEY = b"kvbus-e2e"


class Host:
    """Each public method is one thing that a test can ask for: plain data in, plain data out."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**arguments)

    def generate(
        self, prompts: list[list[int]], max_tokens: int = 16, params: list[dict[str, Any] | None] | None = None
    ) -> list[dict[str, Any]]:
        """Greedy continuations. params: each prompt's kv_transfer_params."""
        from vllm import SamplingParams

        sampling = [
            SamplingParams(
                temperature=0,
                max_tokens=max_tokens,
                detokenize=False,
                ignore_eos=True,
                extra_args={"kv_transfer_params": given} if given is not None else None,
            )
            for given in params or [None] * len(prompts)
        ]
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return [
            {
                "id": output.request_id,
                "tokens": list(output.outputs[0].token_ids),
                "reason": output.outputs[0].finish_reason,
                "cached": output.num_cached_tokens,
                "params": output.kv_transfer_params,
            }
            for output in outputs
        ]

    def generate_for(self, seconds: float, prompts: list[list[int]]) -> list[dict[str, Any]]:
        """The same prompts again and again for this long."""
        outputs = []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            outputs += self.generate(prompts)
        return outputs

    def storm(self, seed: int, count: int) -> dict[str, Any]:
        """See tests.e2e.storm."""
        from tests.e2e.prompts import prompt
        from tests.e2e.storm import storm

        return storm(self.llm, prompt, seed, count)

    def kept(self) -> dict[str, int]:
        """See tests.e2e.storm."""
        from tests.e2e.storm import kept, settle

        settle(self.llm)
        return kept(self.llm)

    def stop(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


def main(address: str, arguments: str) -> None:
    with Client(address, family="AF_UNIX", authkey=AUTHKEY) as test:
        try:
            host = Host(json.loads(arguments))
        except BaseException:
            test.send(("failed", traceback.format_exc()))
            raise
        test.send(("ready", None))
        while True:
            name, given = test.recv()
            try:
                test.send(("done", getattr(host, name)(**given)))
            except Exception:  # noqa: BLE001 - it is the test's to judge
                test.send(("failed", traceback.format_exc()))
            if name == "stop":
                return


if __name__ == "__main__":
    main(*sys.argv[1:])
