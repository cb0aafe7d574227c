"""Bounded load on a vLLM server: streams that finish, streams whose client vanishes, bursts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import httpx


@contextlib.contextmanager
def taking_turns() -> Iterator[None]:
    """Lets kvtop look while the load runs in threads of the same process.

    By default each of them may keep the interpreter for 5 ms, and one look waits for it a
    hundred times: there were two seconds between looks that are to be 50 ms apart.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@dataclass(frozen=True, slots=True)
class Job:
    """One completion request."""

    prompt_chars: int
    """Prompt length; the test tokenizer makes one token a byte."""
    max_tokens: int
    """Exactly so many tokens are generated (`ignore_eos`)."""
    leave_after: int | None = None
    """Close the connection after so many chunks. None: stay to the end."""
    prefix: str = ""
    """Start of the prompt, for prefix hits."""
    start_s: float = 0.0
    """Delay before it is sent."""


async def run(url: str, jobs: Sequence[Job], seed: int = 0) -> dict[str, int]:
    """Run all jobs; returns how many finished, left and failed."""
    result = {"finished": 0, "left": 0, "failed": 0}
    limits = httpx.Limits(max_connections=len(jobs) + 1)
    async with httpx.AsyncClient(timeout=300, limits=limits, trust_env=False) as client:
        rng = random.Random(seed)
        texts = ["".join(rng.choices("abcdefghij", k=job.prompt_chars)) for job in jobs]
        outcomes = await asyncio.gather(
            *(_one(client, url, job, text) for job, text in zip(jobs, texts, strict=True))
        )
    for outcome in outcomes:
        result[outcome] += 1
    return result


async def _one(
    client: httpx.AsyncClient, url: str, job: Job, text: str, reasons: list[str] | None = None
) -> str:
    """How a job ended; adds to `reasons` why it failed."""
    told = [] if reasons is None else reasons
    await asyncio.sleep(job.start_s)
    prompt = job.prefix + text[len(job.prefix) :] if job.prefix else text
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": job.max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    tokens = 0
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                told.append(f"status {answer.status_code}")
                return "failed"
            chunks = 0
            async for line in answer.aiter_lines():
                chunks += bool(line)
                if '"completion_tokens"' in line:
                    tokens = json.loads(line.removeprefix("data: "))["usage"]["completion_tokens"]
                if job.leave_after is not None and chunks >= job.leave_after:
                    return "left"
    except httpx.HTTPError as error:
        told.append(f"{type(error).__name__}: {error}, {tokens} tokens, {time.ctime()}")
        return "failed"
    if tokens == job.max_tokens:
        return "finished"
    # An answer that ends early is a lost request too.
    told.append(f"{tokens} tokens of {job.max_tokens}")
    return "failed"


class Steady:
    """Clients that each send one job after the other until the end of the block.

    Args:
        url: The server.
        clients: Jobs in flight.
        seed: Of their prompts and lengths.
    """

    def __init__(self, url: str, clients: int = 6, seed: int = 0) -> None:
        self._url = url
        self._clients = clients
        self._rng = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.done = {"finished": 0, "left": 0, "failed": 0}
        """How the jobs ended; complete after the block."""
        self.reasons: list[str] = []
        """Why those that failed did."""

    def __enter__(self) -> Steady:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    async def _run(self) -> None:
        async with httpx.AsyncClient(timeout=300, trust_env=False) as client:
            await asyncio.gather(*(self._client(client) for _ in range(self._clients)))

    async def _client(self, client: httpx.AsyncClient) -> None:
        rng = self._rng
        system = "k" * 256
        while not self._stop.is_set():
            job = Job(
                prompt_chars=rng.choice((60, 300, 700)),
                max_tokens=rng.choice((20, 60, 120)),
                prefix=system if rng.random() < 0.5 else "",
            )
            text = "".join(rng.choices("abcdefghij", k=max(job.prompt_chars, 300)))
            self.done[await _one(client, self._url, job, text, self.reasons)] += 1


def mixed(count: int, seed: int = 0) -> list[Job]:
    """Chats with a shared prefix, long prompts, and clients that vanish."""
    rng = random.Random(seed)
    system = "".join(rng.choices("klmnopqrst", k=512))
    jobs = []
    for i in range(count):
        leave = rng.randint(2, 30) if rng.random() < 0.25 else None
        prefix = system if rng.random() < 0.5 else ""
        jobs.append(
            Job(
                prompt_chars=rng.choice((60, 300, 700, 1500)),
                max_tokens=rng.choice((10, 40, 120)),
                leave_after=leave,
                prefix=prefix,
                start_s=i * 0.1,
            )
        )
    return jobs


def storm(count: int = 16) -> list[Job]:
    """More KV than 64 blocks of 128 tokens can hold: preemptions for certain."""
    return [Job(prompt_chars=200, max_tokens=1500) for _ in range(count)]
