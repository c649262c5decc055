"""Steps that workers run independently, and variables on parameter servers."""
