"""The probe on the real scheduler of each vLLM version, against a count from nothing."""

from __future__ import annotations

import pytest

from tests.versions.conftest import INSTALLED, UNPACKED

pytestmark = pytest.mark.vllm

LACKS = {
    "0.10.2": {"deferred frees", "deferred requests", "pause state"},
    "0.12.0": {"deferred frees", "deferred requests", "pause state"},
    "0.15.1": {"deferred frees", "deferred requests", "pause state"},
    "0.20.2": {"deferred frees"},
    "0.25.1": set(),
    "0.28.0": set(),
    "0.32.0": set(),
    "0.33.0": set(),
}
"""What each version does not have, and the probe must name."""


@pytest.mark.parametrize("config", ["full", "window"])
@pytest.mark.parametrize("version", [*UNPACKED, INSTALLED])
class TestVersion:
    def test_every_cut_equals_the_count_from_nothing(self, driven, version, config):
        result = driven(version)[config]
        assert result["failures"] == []
        assert result["version"] == version
        assert result["cuts"] > 300
        # How many come too late is a matter of the machine; most must be compared.
        assert result["late"] < result["cuts"] / 4
        assert set(result["points"]) >= {"boundary", "idle"}

    def test_each_kind_of_block_and_request_was_there(self, driven, version, config):
        seen = driven(version)[config]["seen"]
        kinds = ("free", "cached", "used", "shared", "null")
        phases = ("waiting", "prefill", "decode", "preempted")
        assert all(seen[name] > 5 for name in (*kinds, *phases)), seen
        assert seen["ghost"] == 0

    def test_every_counter_moved(self, driven, version, config):
        counters = driven(version)[config]["counters"]
        assert None not in counters.values()
        assert 0 not in counters.values()

    def test_what_it_lacks_is_named(self, driven, version, config):
        result = driven(version)[config]
        assert set(result["missing"]) == LACKS[version]
        assert not set(result["missing"]) & set(result["found"])

    def test_the_engine_is_described(self, driven, version, config):
        result = driven(version)[config]
        engine = result["engine"]
        groups = [
            (g["kind"], g["block_size_tokens"], g["sliding_window_tokens"])
            for g in engine["groups"]
        ]
        full, window = ("FullAttention", 16, None), ("SlidingWindow", 16, 48)
        assert groups == ([full] if config == "full" else [full, window])
        assert (engine["block_size"], engine["max_model_len"], engine["max_num_seqs"]) == (
            16,
            2048,
            8,
        )
        assert engine["block_bytes"] == result["block_bytes"]
        assert engine["prefix_caching"] is True
        assert engine["state"] == "idle"

    def test_nothing_is_left_behind(self, driven, version, config):
        assert driven(version)[config]["left_behind"] == []
