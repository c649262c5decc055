"""`HangWatchdog`: detects that training hangs, and finds the worker that causes it."""
