"""TensorBoard's "Distplug" tab, which reads the logs of runs rather than event files."""
