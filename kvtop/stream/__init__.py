"""From readings to snapshots: polling, merging, and the live stream."""
