"""A real vLLM on the CPU: a two-layer model made here, served on loopback, always stopped."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.request import urlopen

from kvtop.model.blocks import BlockState
from kvtop.model.snapshot import Engine

START_S = 240.0
"""Longest start on a busy machine; 30 s on a quiet one."""

_MAKE_TOKENIZER = """
import sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
tokenizer.add_special_tokens(["<s>", "</s>"])
tokenizer.save(sys.argv[1])
"""

# `vllm serve` reads the version of a distribution named vllm; the CPU build has another name.
_COMMAND = """
import importlib.metadata, sys
import vllm

plain = importlib.metadata.version

def version(name):
    return vllm.__version__ + "+cpu" if name == "vllm" else plain(name)

importlib.metadata.version = version
if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main
    sys.exit(main())
"""

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 320,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
    "bos_token_id": 256,
    "eos_token_id": 257,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
"""A Llama of two layers: one token of KV is 2 layers x 2 (K, V) x 2 heads x 32 x 2 bytes."""


def make_model(python: str, folder: Path) -> Path:
    """A model folder that needs no download: one byte of text is one token."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = folder / "tokenizer.json"
    subprocess.run([python, "-c", _MAKE_TOKENIZER, str(tokenizer)], check=True)
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
            }
        )
    )
    return folder


def free_port() -> int:
    """A TCP port of the loopback that is free now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class Server:
    """One vLLM server with its process group, its log and its probe directory.

    Args:
        python: Interpreter of the vLLM environment.
        model: Folder of the model.
        folder: Where the log goes.
        arguments: More arguments of the server.
        environment: More variables.
        port: Where it listens. None: a free one.
        sockets: Directory of the probes. None: in `folder`.
        command: Start it as `vllm serve` and not as a module, which takes fewer options.
    """

    def __init__(
        self,
        python: str,
        model: Path,
        folder: Path,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        port: int | None = None,
        sockets: Path | None = None,
        *,
        command: bool = False,
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.sockets = sockets or folder / "sockets"
        self.log = folder / "vllm.log"
        folder.mkdir(parents=True, exist_ok=True)
        env = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "2",
            "KVTOP_DIR": str(self.sockets),
            **(environment or {}),
        }
        env.pop("KVTOP_PROBE", None) if "KVTOP_PROBE" not in (environment or {}) else None
        start = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        if command:
            script = folder / "vllm"
            script.write_text(_COMMAND)
            start = [str(script), "serve", str(model)]
        line = [
            *(python, *start),
            *("--served-model-name", "tiny", "--load-format", "dummy", "--enforce-eager"),
            *("--max-model-len", "4096", "--host", "127.0.0.1", "--port", str(self.port)),
            *arguments,
        ]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                line, env=env, cwd=folder, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self) -> Server:
        """Until it serves. Raises RuntimeError with the end of its log when it does not."""
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if self.process.poll() is not None:
                break
            try:
                with urlopen(f"{self.url}/health", timeout=2) as answer:
                    if answer.status == 200:
                        return self
            except OSError:
                time.sleep(0.2)
        tail = self.log.read_text(errors="replace")[-4000:]
        self.stop()
        raise RuntimeError(f"vLLM did not start:\n{tail}")

    def engine_pid(self) -> int:
        """Process of the engine core, by its title."""
        import psutil

        for child in psutil.Process(self.process.pid).children(recursive=True):
            if "VLLM::EngineCore" in " ".join(child.cmdline()) or child.name().startswith(
                "VLLM::Engine"
            ):
                return child.pid
        raise RuntimeError("no engine core process")

    def stop(self, *, kill: bool = False) -> None:
        """End the whole process group, politely, then not.

        Args:
            kill: Not politely at all: nobody looks at what it leaves, and it is faster.
        """
        politely = () if kill else ((signal.SIGTERM, 15),)
        for sig, patience in (*politely, (signal.SIGKILL, 10)):
            try:
                os.killpg(self.process.pid, sig)
            except ProcessLookupError:
                break
            try:
                self.process.wait(patience)
            except subprocess.TimeoutExpired:
                continue
        # The engine core has a title of its own but stays in the group.
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return


def check_identities(engine: Engine, blocks: int) -> None:
    """What must hold in every cut, block by block and in sums."""
    (pool,) = engine.pools
    counts = pool.counts
    assert pool.states is not None
    assert pool.refs is not None
    assert pool.tables is not None
    parts = (
        *(counts.null, counts.free, counts.cached, counts.used),
        *(counts.shared, counts.held, counts.ghost),
    )
    assert sum(parts) == counts.total == blocks
    assert counts.free + counts.cached == pool.free_queue
    assert counts.ghost == 0
    for state, refs, holders in zip(pool.states, pool.refs, pool.tables, strict=True):
        assert state == BlockState.NULL or refs == holders
    held = [r.blocks - r.shared_blocks for r in engine.requests or () if r.blocks is not None]
    # Blocks of one holder only are those of the requests, counted once over all groups.
    assert sum(held) == sum(n == 1 for n in pool.tables)


def python_or_reason() -> tuple[str, str]:
    """The interpreter of the vLLM environment, or why there is none."""
    python = os.environ.get("KVTOP_VLLM_PYTHON", "")
    if not python:
        return "", "KVTOP_VLLM_PYTHON is not set: tests/vllm/install.sh makes the environment"
    check = "import importlib.metadata as m, vllm; m.distribution('vllm-kvtop')"
    done = subprocess.run([python, "-c", check], capture_output=True, text=True, check=False)
    if done.returncode:
        return "", f"{python} lacks vLLM or kvtop: {done.stderr.strip().splitlines()[-1:]}"
    return python, ""


if __name__ == "__main__":
    print(python_or_reason(), file=sys.stderr)
