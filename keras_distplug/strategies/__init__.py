"""Choice of a `tf.distribute` strategy, and placement of the model inside its scope."""
