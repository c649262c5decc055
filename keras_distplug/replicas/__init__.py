"""`ReplicaMetrics` and `StragglerWatchdog`: how replicas differ from each other."""
