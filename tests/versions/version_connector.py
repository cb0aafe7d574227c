"""A KV connector that moves nothing: the tests say what is remote, and when it has come.

vLLM imports it by name (`kv_connector_module_path`), for the scheduler's side only.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


class StubConnector(KVConnectorBase_V1, SupportsHMA):
    """Loads asynchronously, and keeps finished requests' blocks until they are sent."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.remote: dict[str, int] = {}
        """Request id to tokens that another engine has."""
        self.keep = False
        """Whether the blocks of finished requests are still being sent."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        tokens = self.remote.get(request.request_id, 0)
        return max(0, tokens - num_computed_tokens), tokens > num_computed_tokens

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        return self.keep, None

    request_finished_all_groups = request_finished

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, *args: Any, **kwargs: Any) -> None:
        pass

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
