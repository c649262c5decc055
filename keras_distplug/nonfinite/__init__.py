"""`NaNWatchdog`: updates that are not finite are left out, explained, and their batches kept."""
