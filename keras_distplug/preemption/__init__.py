"""`PreemptionHandler`: a checkpoint, and the end, when the machine is about to go."""
