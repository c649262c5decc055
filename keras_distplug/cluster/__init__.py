"""This process's role in the cluster, and the messages between workers."""
