"""When to act. One public callback a file."""
