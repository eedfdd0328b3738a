"""Which rows go, and how those that stay move together."""
