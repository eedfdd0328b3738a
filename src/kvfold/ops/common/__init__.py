"""Common to several operations: attention written out, pages, angles, and how work is cut."""
