"""`NaNWatchdog`: skips non-finite updates, diagnoses them, and saves their batches."""
