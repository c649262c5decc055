"""Comparison of replicas: `ReplicaMetrics` and `StragglerWatchdog`."""
