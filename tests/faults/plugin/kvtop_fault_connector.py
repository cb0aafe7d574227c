"""A KV connector that moves nothing, and on demand keeps finished requests' blocks for ever.

The fault `keep-sent` of `kvtop_faults`: while its switch is on, two finished requests wait for a
transfer that does not come; when it goes off, the transfer has come. Without the switch it does
nothing at all. For vLLM 0.32 (distributed/kv_transfer/kv_connector/v1/base.py).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from kvtop_faults import Switch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

_MOST = 2


class FaultConnector(KVConnectorBase_V1, SupportsHMA):
    """On the scheduler's side it keeps, on the worker's side it says what has been sent."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._switch = Switch(Path(os.environ["KVTOP_FAULT_DIR"]), "keep-sent")
        self._finished: set[str] = set()

    # The scheduler's side.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        keep = self._switch.on and len(self._switch.requests) < _MOST
        if keep:
            self._switch.requests.append(request.request_id)
            self._switch.tell()
        elif not self._switch.on:
            self._switch.requests.clear()
        return keep, None

    request_finished_all_groups = request_finished

    # The worker's side.

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        self._finished |= finished_req_ids
        if self._switch.on:
            return None, None
        kept: set[str] = set()
        if self._finished:
            try:
                told = json.loads((self._switch.folder / "keep-sent.json").read_text())
                kept = self._finished & set(told["requests"])
            except FileNotFoundError:
                pass
        self._finished.clear()
        return kept or None, None

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, *args: Any, **kwargs: Any) -> None:
        pass

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
