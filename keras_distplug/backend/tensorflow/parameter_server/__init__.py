"""Steps that workers take by themselves, and variables that parameter servers hold."""
