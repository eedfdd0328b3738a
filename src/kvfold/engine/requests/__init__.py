"""What a request asks, and what it holds while it is served."""
