"""What is measured of a model before it is compressed: texts, statistics of its attention."""
