"""Session files: recording, replaying, exporting."""
