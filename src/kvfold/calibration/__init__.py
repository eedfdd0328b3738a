"""Text to calibrate on, and the statistics that are measured on it."""
