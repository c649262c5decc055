"""`BackupAndRestore`: what the state of a run is, when it is saved, and how it is restored."""
