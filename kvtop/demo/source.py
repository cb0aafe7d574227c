"""The simulated GPUs, read like any other source."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtop.errors import BadDataError
from kvtop.model.codec import decode
from kvtop.model.snapshot import Gpu
from kvtop.sources.base import SourceError, one_line
from kvtop.sources.http_client import KeptClient

if TYPE_CHECKING:
    import httpx

_MAX_GPUS = 64


class DemoGpuSource:
    """Reads `/demo/gpus` of a simulated server.

    Args:
        url: Of the server, without a path.
    """

    name = "simulated GPUs"
    """As in `SourceStatus.name`."""
    kind = "nvml"
    """It stands in for NVML."""
    period_s = 1.0
    """As in `Source`."""
    deadline_s = 2.0
    """As in `Source`."""
    target_pid: int | None = None
    """As in `Source`."""

    def __init__(self, url: str) -> None:
        self._url = f"{url.rstrip('/')}/demo/gpus"
        self._client = KeptClient(self._new_client)

    def _new_client(self) -> httpx.AsyncClient:
        import httpx

        # A proxy from the environment has no business between two local processes.
        return httpx.AsyncClient(
            verify=False,  # noqa: S501 - loopback, no TLS
            trust_env=False,
            timeout=self.deadline_s,
        )

    async def read(self) -> tuple[Gpu, ...]:
        """The GPUs, each with `simulated` true.

        Raises:
            SourceError: The simulated server does not answer, or not with GPUs.
        """
        import httpx

        try:
            async with self._client.stream("GET", self._url) as answer:
                await answer.aread()
            answer.raise_for_status()
            data = answer.json()
            listed = data["gpus"][:_MAX_GPUS]
            return tuple(decode(Gpu, gpu) for gpu in listed)
        except httpx.HTTPError as error:
            text = one_line(str(error)) or type(error).__name__
            raise SourceError(f"the simulated GPUs do not answer: {text}") from error
        except (ValueError, KeyError, TypeError, BadDataError) as error:
            raise SourceError("the simulated server answers with something else") from error

    async def close(self) -> None:
        """Hang up."""
        await self._client.close()
