"""Plain values that all subpackages share. Standard library only."""
