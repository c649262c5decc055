"""The tab "Distplug" of TensorBoard. It reads the logs of runs, not TensorBoard's own files."""
