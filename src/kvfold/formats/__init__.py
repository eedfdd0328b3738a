"""Number formats: how many numbers become few bytes, and come back."""
