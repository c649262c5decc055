"""The state of a run: how `BackupAndRestore` captures, saves and restores it."""
