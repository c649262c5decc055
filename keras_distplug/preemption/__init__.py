"""`PreemptionHandler`: saves a checkpoint and ends training on preemption."""
