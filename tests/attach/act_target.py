"""A process like vLLM's API server, for tests of actions: an engine client on an event loop.

It has the parts by which `kvtop.attach.act_code` finds `AsyncLLM`, writes what was asked of it
to the file named first, one line each, and says `ready` when it can be asked.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any


class Processor:
    """Knows the live requests."""

    def __init__(self) -> None:
        self.request_states: dict[str, object] = {"alive-1": object(), "alive-2": object()}


class Core:
    """The client of the engine core in another process."""

    async def abort_requests_async(self, ids: list[str]) -> None:
        """As vLLM's."""
        tell("sent " + ",".join(ids))


class Client:
    """`AsyncLLM` as of vLLM 0.32, or older without `internal`."""

    def __init__(self) -> None:
        self.output_processor = Processor()
        self.engine_core = Core()

    async def abort(self, request_id: str, internal: bool = False) -> None:
        """As vLLM's."""
        if not internal:
            tell("external")
        del self.output_processor.request_states[request_id]
        tell(f"abort {request_id}")

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """As vLLM's: not while a request is there."""
        tell(f"reset {reset_running_requests} {reset_connector}")
        return not self.output_processor.request_states


class OldClient(Client):
    """As of vLLM 0.10: one kind of id, and no word on how a reset went."""

    async def abort(self, request_id: str) -> None:  # type: ignore[override]
        """As vLLM's."""
        del self.output_processor.request_states[request_id]
        tell(f"old abort {request_id}")

    async def reset_prefix_cache(self) -> None:  # type: ignore[override]
        """As vLLM's."""
        tell("old reset")


def tell(text: str) -> None:
    """Write down what was asked."""
    with open(sys.argv[1], "a") as file:
        file.write(text + "\n")


async def inner(engine_client: Any) -> None:
    """The frame that has the client, some coroutines below the task's own."""
    await asyncio.sleep(300)
    del engine_client


async def outer() -> None:
    """Where the task begins."""
    kinds = {"new": Client, "old": OldClient}
    print("ready", flush=True)
    if sys.argv[2] in kinds:
        await inner(kinds[sys.argv[2]]())
    await asyncio.sleep(300)


if __name__ == "__main__":
    asyncio.run(outer())
