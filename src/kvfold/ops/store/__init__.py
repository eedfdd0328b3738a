"""Rows in and out of pages."""
