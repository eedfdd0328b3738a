"""Choosing the rows that go, and how those that stay move together."""
