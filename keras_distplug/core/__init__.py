"""Plain values that every room shares. Standard library only."""
