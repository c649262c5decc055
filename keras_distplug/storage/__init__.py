"""Where bytes go. No TensorFlow here."""
