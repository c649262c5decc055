"""What Python objects hold, what of it has changed since training began, and how it is saved."""
