"""What a kernel's time is, beside the fastest known baseline and the memory's own speed."""
