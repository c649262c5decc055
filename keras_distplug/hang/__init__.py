"""`HangWatchdog`: when nothing moves any more, and whose fault that is."""
