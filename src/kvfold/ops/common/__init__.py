"""What several operations share: attention written out, pages, angles, and how work is cut."""
