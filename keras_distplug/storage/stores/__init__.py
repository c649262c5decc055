"""The kinds of stores, each loaded when one of its URLs is opened."""
