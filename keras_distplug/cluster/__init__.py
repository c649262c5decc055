"""Who we are in the cluster, and how we agree with the others."""
