"""The engine's loop: schedule, run, postprocess; prefix cache and failures."""
